"""The front end's account of a replica's KV cache; the simulator uses it too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_specs.loader import resolve
from cost_model.pipeline import PipelineSemantics, prompts_held
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement, Replica
from hexgen2.prediction.kv_capacity import kv_capacity_tokens

BATCHES_PER_REPLICA = 2


def kv_budgets(placement: Placement) -> dict[str, int]:
    """Tokens of KV cache that each replica may hold: what fits in its memory, up to a useful limit.

    For replicas that decode, the limit is BATCHES_PER_REPLICA full batches of the longest context. A prefill
    replica takes only as many prompts as keep it busy, so that waiting ones can still go elsewhere:
    BATCHES_PER_REPLICA times the prompts that it computes and sends, or the longest prompt if that is more.
    """
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    costs = placement.costs()
    return {
        replica.id: min(_useful_tokens(replica, placement), kv_capacity_tokens(replica, cluster, costs))
        for replica in placement.replicas
    }


def growth_tokens(placement: Placement) -> int:
    """Tokens by which a decoding request is expected to grow: half of the workload's mean output."""
    return math.ceil(placement.workload.osl / 2)


def _useful_tokens(replica: Replica, placement: Placement) -> int:
    longest = placement.model.max_position
    if replica.role != "prefill":
        return BATCHES_PER_REPLICA * replica.max_batch * longest
    semantics: PipelineSemantics = placement.cost_model.pipeline  # type: ignore[assignment]
    isl, steps = placement.workload.isl, replica.engine.steps_in_flight(semantics, len(replica.stages))
    prompts = min(replica.max_batch, replica.engine.step_tokens / isl)
    planned = math.ceil(prompts_held(prompts, steps + 1) * isl)
    return BATCHES_PER_REPLICA * max(planned, longest)


@dataclass(slots=True)
class KvBudget:
    """The KV cache of a replica, and how much of it each request holds.

    `held` has the current KV cache tokens per request. Requests grow as they decode, so a new one is admitted
    only if all of them can still grow by `growth_tokens`; if they grow further, the replica preempts. Their
    total may reach `high_water` of the budget; a request that is alone may use all of it. `refused` is set
    when the replica had no room although the account showed some, until something is released. `crowded` is
    set while the engine reports so; it is ignored for an idle replica, whose report may be stale. The cache
    is in `groups` equal parts (attention data parallelism), and a request has to fit into one of them.
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
    _targets: dict[Any, str] = field(default_factory=dict)
    _target_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def largest_request_tokens(self) -> int:
        """Tokens of the longest request that an idle replica can hold."""
        return self.kv_budget_tokens // self.groups

    def has_room(self, tokens: int, prefill_only: bool) -> bool:
        """Whether a request of that many KV tokens, which fits an idle replica, may be sent now.

        Prefill-only requests need room in the KV budget. Those that decode also need room for the expected
        growth of all, and at most BATCHES_PER_REPLICA batches may be on the replica.
        """
        if self.refused:
            return False
        if not self.held:
            return True
        if self.crowded:
            return False
        growth = 0 if prefill_only else self.growth_tokens * (len(self.held) + 1)
        if self.held_tokens + tokens + growth > self.kv_budget_tokens * self.high_water:
            return False
        return prefill_only or len(self.held) < BATCHES_PER_REPLICA * self.max_batch

    def has_room_toward(self, target: str, tokens: int, share: float) -> bool:
        """Whether requests that continue on the replica `target` may hold so many more tokens, if they have
        at most this share of the budget; one request always may."""
        held = self._target_tokens.get(target, 0)
        return not held or held + tokens <= share * self.kv_budget_tokens

    def hold(self, request_id: Any, tokens: int, target: str = "") -> None:
        """Count the tokens of a request, which continues on the replica `target` if it is prefilled here."""
        self.held[request_id] = tokens
        self.held_tokens += tokens
        if target:
            self._targets[request_id] = target
            self._target_tokens[target] = self._target_tokens.get(target, 0) + tokens

    def grow(self, request_id: Any, tokens: int = 1) -> None:
        """Count further tokens of a request that holds KV cache here."""
        if request_id in self.held:
            self.held[request_id] += tokens
            self.held_tokens += tokens

    def release(self, request_id: Any) -> None:
        """Free what a request holds here; nothing if it holds nothing."""
        tokens = self.held.pop(request_id, 0)
        self.held_tokens -= tokens
        self.refused = False
        if target := self._targets.pop(request_id, ""):
            self._target_tokens[target] -= tokens
