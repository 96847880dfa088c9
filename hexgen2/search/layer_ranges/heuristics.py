"""Placements by rule, as other systems have them: baselines, and where a search starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hexgen2.search.layer_ranges.instance import NOTHING, Instance, Range, Ranges
from hexgen2.search.layer_ranges.max_flow import FlowValue


def petals(instance: Instance) -> Ranges:
    """Petals (Borzunov et al., 2023): nodes join one after another, each with as many layers as it can hold,
    where tokens/s are least so far. In the order of the nodes."""
    passes = [0.0] * instance.layers
    ranges = []
    for node in range(instance.nodes):
        count, held = instance.most_layers[node], NOTHING
        while count and held == NOTHING:
            starts = [s for s in range(instance.layers - count + 1) if instance.tok_s(node, (s, s + count))]
            if starts:
                first = min(starts, key=lambda s: (sorted(passes[s : s + count]), s))
                held = (first, first + count)
            count -= 1
        for layer in range(*held):
            passes[layer] += instance.tok_s(node, held)
        ranges.append(held)
    return tuple(ranges)


def even_stages(layers: int, stages: int) -> list[Range]:
    """The model in so many stages, which differ by one layer at most."""
    bounds = [layers * s // stages for s in range(stages + 1)]
    return list(itertools.pairwise(bounds))


def swarm(instance: Instance) -> Ranges | None:
    """Swarm (Ryabinin et al., 2023) as Helix compares with it (section 6.2): the fewest equal stages that the
    weakest node can hold, and each node, fast ones first, where tokens/s are least so far. None if there are
    more stages than nodes, or some stage does not fit its node."""
    weakest = min((most for most in instance.most_layers if most), default=0)
    if not weakest:
        return None
    fewest = -(-instance.layers // weakest)
    equal = (s for s in range(fewest, min(2 * fewest, instance.nodes) + 1) if instance.layers % s == 0)
    return balanced(instance, even_stages(instance.layers, next(equal, fewest)))


def balanced(instance: Instance, stages: Sequence[Range]) -> Ranges | None:
    """Each node, fast ones first, to that stage which it fits and where tokens/s are least so far."""
    if len(stages) > instance.nodes:
        return None
    passes = [0.0] * len(stages)
    ranges = [NOTHING] * instance.nodes
    fastest = [max(instance.tok_s(node, stage) for stage in stages) for node in range(instance.nodes)]
    for node in sorted(range(instance.nodes), key=lambda v: (-fastest[v], v)):
        able = [s for s, stage in enumerate(stages) if instance.tok_s(node, stage)]
        if able:
            least = min(able, key=lambda s: (passes[s], s))
            passes[least] += instance.tok_s(node, stages[least])
            ranges[node] = stages[least]
    return tuple(ranges) if min(passes) > 0 else None


def separate_pipelines(instance: Instance) -> Ranges | None:
    """Pipelines of one kind of node each (Helix, section 6.2), those of a kind as many as pass most. Kinds
    whose nodes cannot hold the model together stay idle. None if that is all of them."""
    value = FlowValue(instance)
    ranges = [NOTHING] * instance.nodes
    for kind in range(len(instance.tables)):
        members = [node for node, k in enumerate(instance.kind) if k == kind]
        best, most = ranges, 0.0
        for pipelines in range(1, len(members) + 1):
            tried = list(ranges)
            for p in range(pipelines):
                mine = members[len(members) * p // pipelines : len(members) * (p + 1) // pipelines]
                for node, stage in zip(mine, even_stages(instance.layers, len(mine)), strict=True):
                    tried[node] = stage if instance.tok_s(node, stage) else NOTHING
            own = [held if node in members else NOTHING for node, held in enumerate(tried)]
            if (tok_s := value(own)) > most * (1 + 1e-12):
                best, most = tried, tok_s
        ranges = list(best)
    return tuple(ranges) if any(held != NOTHING for held in ranges) else None


def one_chain(instance: Instance) -> Ranges | None:
    """Every node once in a row, layers in proportion to what nodes hold at most; None if they cannot hold the
    model together."""
    room = math.fsum(instance.most_layers)
    if room < instance.layers:
        return None
    ranges, first, filled = [], 0, 0.0
    for node, most in enumerate(instance.most_layers):
        filled += most
        end = min(instance.layers, first + most, -(-int(instance.layers * filled) // int(room)))
        ranges.append((first, end) if end > first and instance.tok_s(node, (first, end)) else NOTHING)
        first = max(first, end) if ranges[-1] != NOTHING else first
    return tuple(ranges) if first == instance.layers else None
