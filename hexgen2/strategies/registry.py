"""Every strategy by name. Adding one is a module beside this file and a line here."""

from __future__ import annotations

import difflib
from importlib import import_module

from cost_model.errors import InputError
from hexgen2.search.enumeration import MAX_GPUS
from hexgen2.search.problem import Phases
from hexgen2.strategies.base import Strategy

STRATEGIES: dict[str, tuple[str, str]] = {
    "hexgen2": ("hexgen2:search", "HexGen-2: partition, coarsen, plan, max flow, flow-guided refinement"),
    "exact": ("exact:search", f"exhaustive search, up to {MAX_GPUS} GPUs"),
    "hexgen2-paper": (
        "baselines.paper:search",
        "HexGen-2 as printed: a fixed number of groups, flow-guided swaps only",
    ),
    "random-swap": (
        "baselines.random_swap:search",
        "HexGen-2's truncated variant: random swaps instead of guided ones",
    ),
    "genetic": (
        "baselines.genetic:search",
        "HexGen's genetic algorithm: merge, split, swap and move over generations",
    ),
    "hexgen": (
        "baselines.hexgen:search",
        "HexGen: colocated replicas, asymmetric parallelism, genetic algorithm",
    ),
    "vllm": (
        "baselines.vllm:search",
        "vLLM: colocated replicas, one uniform tensor x pipeline shape per GPU type",
    ),
    "splitwise": ("baselines.splitwise:search", "Splitwise: fast GPU types prefill, slow ones decode"),
    "huawei": (
        "baselines.huawei:search",
        "Huawei: the tensor degree of each machine, by its workload-aware estimate",
    ),
    "distserve": (
        "baselines.distserve:search",
        "DistServe: one GPU type per phase, uniform tensor x pipeline shapes",
    ),
    "helix": (
        "baselines.layer_ranges:search_helix",
        "Helix: overlapping ranges of layers, one per node, of greatest max flow; a path for each request",
    ),
    "petals": (
        "baselines.layer_ranges:search_petals",
        "Petals: each node where its layers are rarest so far",
    ),
    "swarm": (
        "baselines.layer_ranges:search_swarm",
        "Swarm: equal stages that the weakest node holds, balanced",
    ),
    "separate-pipelines": (
        "baselines.layer_ranges:search_separate",
        "a pipeline of each kind of node by itself",
    ),
    "hetis": (
        "baselines.hetis:search",
        "Hetis: fast GPU types hold the weights, slow ones take heads of decode attention",
    ),
}
"""Where each strategy is in this folder, and what it does. Only the one that is asked for is imported, which
takes time."""

CHOOSE_PHASES = ("hexgen2", "exact")
"""The strategies that decide which replicas do which phase, unless --phases says so."""
RANGES = ("helix", "petals", "swarm", "separate-pipelines")
"""The strategies that give each node a range of layers."""


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
        module, function = STRATEGIES[name][0].split(":")
        found: Strategy = getattr(import_module(f"hexgen2.strategies.{module}"), function)
        return found
    near = difflib.get_close_matches(name, STRATEGIES, n=1)
    remedy = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(STRATEGIES)}"
    raise InputError("--strategy", "", f"unknown strategy '{name}'", remedy)
