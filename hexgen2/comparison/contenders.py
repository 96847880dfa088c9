"""Contenders of a comparison: strategies, their phases, batching policies and clusters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from cluster_specs.schema import ClusterSpec
from cost_model.errors import InputError
from hexgen2.schedulers import FLOW, WORKLOAD_AWARE
from hexgen2.search.problem import Phases
from hexgen2.simulator.batching import POLICIES, Policy
from hexgen2.strategies.registry import CHOOSE_PHASES, find_strategy

RUNTIME: Policy = "mixed"
ENGINES: dict[str, Policy] = {"hexgen": "prefill-first", "vllm": "chunked", "huawei": "chunked"}
"""The policy of each colocated strategy's engine: HexGen's has no chunked prefill, vLLM's does by default."""
ROUTED_BY = {"huawei": WORKLOAD_AWARE}
"""The scheduler of strategies that bring one of their own."""


@dataclass(frozen=True)
class Contender:
    """Plans with `strategy` on a cluster; its colocated replicas run with `policy`.

    phases : what its replicas may do, if that was asked for
    cluster : its name, or its file as the user wrote it
    spec : the cluster itself, if the user gave an object
    """

    strategy: str
    policy: Policy
    cluster: str
    spec: ClusterSpec | None = field(default=None, repr=False, compare=False)
    phases: Phases | None = None

    @property
    def scheduler(self) -> str:
        """What chooses the routes of its requests."""
        return ROUTED_BY.get(self.strategy, FLOW)

    @property
    def name(self) -> str:
        """As on the command line: strategy, phases if asked for, policy unless it is the strategy's default,
        and cluster."""
        usual = ENGINES.get(self.strategy, RUNTIME)
        policy = f":{self.policy}" if self.policy != usual else ""
        phases = f":{self.phases}" if self.phases else ""
        return f"{self.strategy}{phases}{policy}@{self.cluster}"


def parse_contenders(text: str, cluster: str | Path | ClusterSpec) -> list[Contender]:
    """Parse a list such as "hexgen2:disaggregated,vllm:prefill-first,distserve@hexgen2-homogeneous". A
    contender that names no cluster gets `cluster`.

    Raises
    ------
    InputError : unknown strategy, phases or policy, empty list, or a contender named twice
    """
    spec = cluster if isinstance(cluster, ClusterSpec) else None
    usual_cluster = spec.name if spec else str(cluster)
    found = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        rest, _, own = part.partition("@")
        strategy, *words = rest.split(":")
        find_strategy(strategy)
        policy, phases = ENGINES.get(strategy, RUNTIME), None
        for word in words:
            if word in get_args(Phases) and strategy in CHOOSE_PHASES:
                phases = word
            elif word in POLICIES:
                policy = word  # type: ignore[assignment]
            else:
                chosen = get_args(Phases) if strategy in CHOOSE_PHASES else ()
                problem = f"unknown {'phases or ' if chosen else ''}policy {word[:40]!r}"
                remedy = f"use one of {', '.join((*chosen, *get_args(Policy)))}"
                raise InputError("--strategies", part[:100], problem, remedy)
        on = (own, None) if own else (usual_cluster, spec)
        found.append(Contender(strategy, policy, *on, phases))  # type: ignore[arg-type]
    if not found:
        raise InputError("--strategies", "", "is empty", "name strategies, as in hexgen2,hexgen,vllm")
    if len({one.name for one in found}) < len(found):
        raise InputError("--strategies", text[:100], "names a contender twice", "name each one once")
    return found
