"""What happens in a simulation beside its requests: failures, re-plans, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hexgen2.placement import Placement, Replica
from hexgen2.simulator.batching import Batching, Policy


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
    gathered, look_steps : when replicas that decode turn to prompts (see batching.py)
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
    gathered: int = 1
    look_steps: int = 1

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
