"""What happens in a simulation beside its requests: failures, re-plans, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hexgen2.headwise.allocation import THETA
from hexgen2.placement import Placement, Replica
from hexgen2.simulator.batching import Batching, Policy
from runtime.routing.output_lengths import OutputLengths
from runtime.routing.router import Router


@dataclass(frozen=True)
class Failure:
    """A replica that is lost at some time."""

    at_s: float
    replica: str


@dataclass(frozen=True)
class Replan:
    """A placement to which the fleet switches at some time (see changeover.py)."""

    at_s: float
    placement: Placement


@dataclass(frozen=True)
class HeadOptions:
    """How heads of decode attention are dispatched to attention workers (see hexgen2/headwise/).

    Attributes
    ----------
    theta : requests are dispatched anew where attention takes 1 + theta times the ideal; None: never
    balances_memory : whether requests are dispatched anew where a device has no memory left, before the one
        that came last is preempted
    profile_error : each number of each device's profile is off by up to this share
    seed : of these errors
    """

    theta: float | None = THETA
    balances_memory: bool = True
    profile_error: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Options:
    """Everything about a simulation beyond placement and requests.

    Attributes
    ----------
    policy : how colocated replicas mix prompts and decodes
    queue_limit : requests that may wait for a route; None: no limit
    failures : replicas lost during the run
    replans : placements to switch to during the run
    recover : whether requests of a lost replica restart elsewhere from their prompt and the tokens generated
        so far, as in the runtime; otherwise they fail
    front_end_s : seconds of overhead per request, from the client to the queue of a replica and back
    step_tokens : most tokens in a step with prompts, of prefill replicas as well (vLLM's
        max_num_batched_tokens); None: as each replica's engine settings say
    max_batch : most requests of a replica that decodes (vLLM's max_num_seqs); None: as planned
    max_concurrency : most requests in flight (see clients.py); None: no limit
    shift_load : whether shares of routes move when requests wait and are longer or shorter than planned, as
        in the runtime
    scheduler : how the route of a request is chosen (runtime/routing/schedulers.py), by name or as a router
        of that kind, or its path through ranges of layers (runtime/routing/paths/); None: by the flow
    output_lengths : what predicts the output of a request for schedulers that ask, or its name; None: the
        default (runtime/routing/output_lengths.py)
    seed : of random choices of paths
    gathered, look_steps : when replicas that decode turn to prompts (see batching.py)
    heads : of replicas with attention workers
    """

    policy: Policy = "mixed"
    queue_limit: int | None = None
    failures: Sequence[Failure] = ()
    replans: Sequence[Replan] = ()
    recover: bool = True
    front_end_s: float = 0.0
    step_tokens: int | None = None
    max_batch: int | None = None
    max_concurrency: int | None = None
    shift_load: bool = True
    scheduler: str | Router | None = None
    output_lengths: str | OutputLengths | None = None
    seed: int = 0
    gathered: int = 1
    look_steps: int = 1
    heads: HeadOptions = HeadOptions()

    def batching(self, replica: Replica) -> Batching:
        """How a replica fills its steps."""
        return Batching(
            "mixed" if replica.role == "decode" else self.policy,
            self.step_tokens or replica.engine.step_tokens,
            self.max_batch,
            replica.engine.chunk_tokens,
            gathered=self.gathered,
            look_steps=self.look_steps,
        )
