"""Contenders of a comparison: a strategy, the batching policy of its colocated replicas, and its cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from cluster_specs.schema import ClusterSpec
from cost_model.errors import InputError
from hexgen2.simulator.batching import POLICIES, Policy
from hexgen2.strategies.registry import find_strategy

RUNTIME: Policy = "mixed"
ENGINES: dict[str, Policy] = {"hexgen": "prefill-first", "vllm": "chunked"}
"""The policy of each colocated strategy's engine: HexGen's has no chunked prefill, vLLM's does by default."""


@dataclass(frozen=True)
class Contender:
    """Plans with `strategy` on a cluster; its colocated replicas run with `policy`.

    cluster : its name, or its file as the user wrote it
    spec : the cluster itself, if the user gave an object
    """

    strategy: str
    policy: Policy
    cluster: str
    spec: ClusterSpec | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """As on the command line: strategy, policy unless it is the strategy's default, and cluster."""
        usual = ENGINES.get(self.strategy, RUNTIME)
        policy = f":{self.policy}" if self.policy != usual else ""
        return f"{self.strategy}{policy}@{self.cluster}"


def parse_contenders(text: str, cluster: str | Path | ClusterSpec) -> list[Contender]:
    """Parse a list such as "hexgen2,vllm:prefill-first,distserve@hexgen2-homogeneous". A contender that names
    no cluster gets `cluster`.

    Raises
    ------
    InputError : unknown strategy or policy, empty list, or a contender named twice
    """
    spec = cluster if isinstance(cluster, ClusterSpec) else None
    usual_cluster = spec.name if spec else str(cluster)
    found = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        rest, _, own = part.partition("@")
        strategy, _, policy = rest.partition(":")
        find_strategy(strategy)
        if policy and policy not in POLICIES:
            remedy = f"use one of {', '.join(get_args(Policy))}"
            raise InputError("--strategies", part[:100], f"unknown policy {policy[:40]!r}", remedy)
        usual = ENGINES.get(strategy, RUNTIME)
        on = (own, None) if own else (usual_cluster, spec)
        found.append(Contender(strategy, policy or usual, *on))  # type: ignore[arg-type]
    if not found:
        raise InputError("--strategies", "", "is empty", "name strategies, as in hexgen2,hexgen,vllm")
    if len({one.name for one in found}) < len(found):
        raise InputError("--strategies", text[:100], "names a contender twice", "name each one once")
    return found
