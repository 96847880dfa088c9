"""Every strategy by name. Adding one is a module beside this file and a line here."""

from __future__ import annotations

import difflib

from cost_model.errors import InputError
from hexgen2.search.enumeration import MAX_GPUS
from hexgen2.search.problem import Phases
from hexgen2.strategies import exact, hexgen2
from hexgen2.strategies.base import Strategy
from hexgen2.strategies.baselines import (
    distserve,
    genetic,
    hetis,
    hexgen,
    huawei,
    layer_ranges,
    paper,
    random_swap,
    splitwise,
    vllm,
)

STRATEGIES: dict[str, tuple[Strategy, str]] = {
    hexgen2.NAME: (hexgen2.search, "HexGen-2: partition, coarsen, plan, max flow, flow-guided refinement"),
    exact.NAME: (exact.search, f"exhaustive search, up to {MAX_GPUS} GPUs"),
    paper.NAME: (paper.search, "HexGen-2 as printed: a fixed number of groups, flow-guided swaps only"),
    random_swap.NAME: (
        random_swap.search,
        "HexGen-2's truncated variant: random swaps instead of guided ones",
    ),
    genetic.NAME: (
        genetic.search,
        "HexGen's genetic algorithm: merge, split, swap and move over generations",
    ),
    hexgen.NAME: (hexgen.search, "HexGen: colocated replicas, asymmetric parallelism, genetic algorithm"),
    vllm.NAME: (vllm.search, "vLLM: colocated replicas, one uniform tensor x pipeline shape per GPU type"),
    splitwise.NAME: (splitwise.search, "Splitwise: fast GPU types prefill, slow ones decode"),
    huawei.NAME: (huawei.search, "Huawei: the tensor degree of each machine, by its workload-aware estimate"),
    distserve.NAME: (distserve.search, "DistServe: one GPU type per phase, uniform tensor x pipeline shapes"),
    layer_ranges.HELIX: (
        layer_ranges.search_helix,
        "Helix: overlapping ranges of layers, one per node, of greatest max flow; a path for each request",
    ),
    layer_ranges.PETALS: (layer_ranges.search_petals, "Petals: each node where its layers are rarest so far"),
    layer_ranges.SWARM: (
        layer_ranges.search_swarm,
        "Swarm: equal stages that the weakest node holds, balanced",
    ),
    layer_ranges.SEPARATE: (layer_ranges.search_separate, "a pipeline of each kind of node by itself"),
    hetis.NAME: (
        hetis.search,
        "Hetis: fast GPU types hold the weights, slow ones take heads of decode attention",
    ),
}


CHOOSE_PHASES = (hexgen2.NAME, exact.NAME)
"""The strategies that decide which replicas do which phase, unless --phases says so."""


def phases_of(strategy: str) -> Phases:
    """The phases among which a strategy chooses. All others have roles of their own."""
    return "flexible" if strategy in CHOOSE_PHASES else "disaggregated"


def find_strategy(name: str) -> Strategy:
    """The strategy of that name.

    Raises
    ------
    InputError : unknown name; the nearest known is suggested
    """
    if name in STRATEGIES:
        return STRATEGIES[name][0]
    near = difflib.get_close_matches(name, STRATEGIES, n=1)
    remedy = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(STRATEGIES)}"
    raise InputError("--strategy", "", f"unknown strategy '{name}'", remedy)
