"""The front end's account of a replica's KV cache; the simulator uses it too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_specs.loader import resolve
from cost_model.pipeline import (
    BATCHES_PER_REPLICA,
    PipelineSemantics,
    kept_prompts,
    outgoing_prompts,
    prompts_held,
)
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement, Replica
from hexgen2.prediction.kv_capacity import kv_capacity_tokens
from runtime.routing.backlog import Backlog
from runtime.routing.instances import Instance
from runtime.routing.windowed_room import WindowedAccount


def kv_budgets(placement: Placement) -> dict[str, int]:
    """Tokens of KV cache that each replica may hold: what fits in its memory, up to a useful limit.

    For replicas that decode, the limit is BATCHES_PER_REPLICA full batches of the longest context. A prefill
    replica takes only as many prompts as keep it busy, so that waiting ones can still go elsewhere:
    BATCHES_PER_REPLICA times the prompts that it computes and sends, or the longest prompt if that is more.
    A mixed replica has both.
    """
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    costs = placement.costs()
    return {
        replica.id: min(
            useful_tokens(replica, placement),
            kv_capacity_tokens(replica, cluster, costs, placement.workers_of(replica.id)),
        )
        for replica in placement.replicas
    }


def growth_tokens(placement: Placement) -> int:
    """Tokens by which a decoding request is expected to grow: half of the workload's mean output."""
    return math.ceil(placement.workload.osl / 2)


def outgoing_tokens(replica: Replica, placement: Placement) -> int | None:
    """Tokens of KV cache that are kept for prompts for other replicas in a mixed replica, which may take no
    more; None: nothing is kept, and they may take all (in other roles).

    If all of its prompts go to others, that is what keeps its steps busy, else their planned share of it.
    """
    if replica.role != "mixed":
        return None
    prompts = [route for route in placement.routes if route.from_ == replica.id]
    sent = math.fsum(route.flow_req_s for route in prompts if route.to != replica.id)
    share = sent / (math.fsum(route.flow_req_s for route in prompts) or 1.0)
    isl, steps = placement.workload.isl, _steps(replica, placement)
    return math.ceil(isl * kept_prompts(share, replica.engine.chunk_tokens / isl, steps, replica.max_batch))


def useful_tokens(replica: Replica, placement: Placement) -> int:
    """Tokens of KV cache beyond which a replica has no use for more: see `kv_budgets`."""
    batches = BATCHES_PER_REPLICA * replica.max_batch * placement.model.max_position
    if replica.role == "mixed":
        return batches + _tokens_of_prompts(replica, placement)
    return _tokens_of_prompts(replica, placement) if replica.role == "prefill" else batches


def _tokens_of_prompts(replica: Replica, placement: Placement) -> int:
    """Tokens of the prompts for other replicas that keep a replica busy."""
    isl, steps = placement.workload.isl, _steps(replica, placement)
    if replica.role == "mixed":
        return math.ceil(outgoing_prompts(replica.engine.chunk_tokens / isl, steps) * isl)
    longest = placement.model.max_position
    prompts = min(replica.max_batch, replica.engine.step_tokens / isl)
    planned = math.ceil(prompts_held(prompts, steps + 1) * isl)
    return BATCHES_PER_REPLICA * max(planned, longest)


def _steps(replica: Replica, placement: Placement) -> int:
    """Steps that the replica has in flight."""
    semantics: PipelineSemantics = placement.cost_model.pipeline  # type: ignore[assignment]
    return replica.engine.steps_in_flight(semantics, len(replica.stages))


@dataclass(slots=True)
class KvBudget:
    """The KV cache of a replica, and how much of it each request holds.

    `held` has the current KV cache tokens per request. Requests grow as they decode, so a new one is admitted
    only if all of them can still grow by `growth_tokens`; if they grow further, the replica preempts. Their
    total may reach `high_water` of the budget; a request that is alone may use all of it. `refused` is set
    when the replica had no room although the account showed some, until something is released. `crowded` is
    set while the engine reports so; it is ignored for an idle replica, whose report may be stale. The cache
    is in `groups` equal parts (attention data parallelism), and a request has to fit into one of them.
    `outgoing_tokens` of it are kept for prompts for other replicas (None: none, and they may take all). Each
    request may take up to `rounding_tokens` more than it holds, since memory comes in blocks. That counts
    where prompts for others wait for memory (in mixed replicas) beside KV caches that others send: then all
    of these always fit, and two replicas that send to each other never wait for each other. It also counts
    with attention workers, where the longest request has `largest_tokens`, because heads are whole; and with
    layers that have a window and an account of their own (`windowed`), since then no worker ever lacks blocks
    that the account shows.
    """

    kv_budget_tokens: int
    max_batch: int
    growth_tokens: int = 0
    high_water: float = 1.0
    held: dict[Any, int] = field(default_factory=dict)
    held_tokens: int = 0
    refused: bool = False
    crowded: bool = False
    groups: int = 1
    outgoing_tokens: int | None = None
    rounding_tokens: int = 0
    backlog: Backlog = field(default_factory=Backlog)
    instance: Instance | None = None
    largest_tokens: int | None = None
    windowed: WindowedAccount | None = None
    _targets: dict[Any, str] = field(default_factory=dict)
    _target_tokens: dict[str, int] = field(default_factory=dict)
    _sent_tokens: int = 0

    def __post_init__(self) -> None:
        if self.windowed is not None:
            size = self.windowed.room.block_tokens
            self.rounding_tokens = size - 1
            self.growth_tokens = max(self.growth_tokens, size) if self.growth_tokens else 0

    @property
    def largest_request_tokens(self) -> int:
        """Tokens of the longest request that an idle replica can hold."""
        return self.kv_budget_tokens // self.groups if self.largest_tokens is None else self.largest_tokens

    def has_room(self, tokens: int, prefill_only: bool, uncounted: int = 0) -> bool:
        """Whether a request of that many KV tokens, which fits an idle replica, may be sent now.

        Those that decode here need room for the expected growth of all that do, and at most
        BATCHES_PER_REPLICA batches of them may be on the replica. Prefill-only requests do not grow.
        The others may have `uncounted` tokens more than this account knows.
        """
        if self.refused:
            return False
        if not self.held:
            return True
        if self.crowded or not self._windows_have_room(tokens, prefill_only):
            return False
        decoding = len(self.held) - len(self._targets)
        growth = self.growth_tokens * (decoding + (not prefill_only))
        rounding = self.rounding_tokens * (len(self.held) + 1)
        held, budget = self.held_tokens + uncounted, self.kv_budget_tokens * self.high_water
        if self.outgoing_tokens is not None:
            if prefill_only:
                return held + tokens + rounding <= budget
            held, budget = held - self._sent_tokens, budget - self.outgoing_tokens
        if held + tokens + growth + rounding > budget:
            return False
        return prefill_only or decoding < BATCHES_PER_REPLICA * self.max_batch

    def _windows_have_room(self, tokens: int, prefill_only: bool) -> bool:
        """Whether layers with a window have room for such a request."""
        growth = None if prefill_only else self.growth_tokens
        return self.windowed is None or self.windowed.has_room(tokens, growth, self.high_water)

    def know(self, instance: Instance) -> None:
        """Tell the scheduler what the replica is; it holds what this account says."""
        self.instance = instance.holding(self.kv_budget_tokens, self.max_batch)

    def has_room_toward(self, target: str, tokens: int, share: float) -> bool:
        """Whether requests that continue on the replica `target` may hold so many more tokens, if they have
        at most this share of what prompts for other replicas may take together; one request always may."""
        limit = self.kv_budget_tokens if self.outgoing_tokens is None else self.outgoing_tokens
        held = self._target_tokens.get(target, 0)
        if held and held + tokens > share * limit:
            return False
        return not self._sent_tokens or self._sent_tokens + tokens <= limit

    def hold(self, request_id: Any, tokens: int, target: str = "") -> None:
        """Count the tokens of a request, which continues on the replica `target` if it is prefilled here."""
        self.held[request_id] = tokens
        self.held_tokens += tokens
        if self.windowed is not None:
            self.windowed.hold(request_id, tokens, None if target else self.growth_tokens)
        if target:
            self._targets[request_id] = target
            self._target_tokens[target] = self._target_tokens.get(target, 0) + tokens
            self._sent_tokens += tokens

    def grow(self, request_id: Any, tokens: int = 1) -> None:
        """Count further tokens of a request that holds KV cache here."""
        if request_id in self.held:
            self.held[request_id] += tokens
            self.held_tokens += tokens
            if self.windowed is not None:
                self.windowed.grow(request_id, self.held[request_id])

    def release(self, request_id: Any) -> None:
        """Free what a request holds here; nothing if it holds nothing."""
        tokens = self.held.pop(request_id, 0)
        self.held_tokens -= tokens
        self.refused = False
        self.backlog.end(request_id)
        if self.windowed is not None:
            self.windowed.release(request_id)
        if target := self._targets.pop(request_id, ""):
            self._target_tokens[target] -= tokens
            self._sent_tokens -= tokens
