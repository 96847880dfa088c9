"""The best placement in stages, by dynamic programme, if links carry all that nodes pass.

In stages, two nodes hold the same layers or none in common. A flow of F needs stages of c layers whose nodes
pass F together; f(n) is the most layers that stages cover with n_t nodes of each kind t:

    f(n) = max over stages (c, m) with m <= n of f(n - m) + c, and f(n) >= L means that F is possible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from hexgen2.search.layer_ranges.instance import NOTHING, Instance, Range, Ranges

MOST_STATES = 1_000_000
MOST_WORK = 1_000_000_000
"""Numbers of nodes by kind, and these times stages, beyond which the programme would take too long."""
PRECISION = 1e-6
"""Relative width to which F is bisected; the stages found may pass more."""
NOTHING_OF = 1e-9
"""Share of the greatest F below which none is tried."""
Stage = tuple[int, tuple[int, ...]]
"""Layers, and nodes of each kind."""


def best_stages(
    instance: Instance,
    least: float,
    most: float,
    stop: Callable[[], bool] = lambda: False,
) -> Ranges | None:
    """The placement in stages with the greatest flow between `least` and `most` tokens/s; None if there is
    none, or the cluster is too large."""
    kinds = [k for k, count in enumerate(instance.kind_counts) if count]
    counts = tuple(instance.kind_counts[k] for k in kinds)
    states = math.prod(count + 1 for count in counts)
    if states > MOST_STATES:
        return None
    tables = [instance.tables[k][0].tolist() for k in kinds]
    found: list[Stage] | None = None
    low, flow, nothing = least, most, most * NOTHING_OF
    while not stop() and flow > max(nothing, low * (1 + PRECISION)):
        stages = _stages(tables, counts, flow, instance.layers, MOST_WORK // states)
        chosen = _cover(stages, counts, instance.layers) if stages else None
        if chosen is None:
            most = flow
        else:
            found, low = chosen, max(flow, min(_passes(tables, stage) for stage in chosen))
        if most <= low * (1 + PRECISION):
            break
        flow = 0.5 * (low + most)
    return None if found is None else _ranges(instance, kinds, tables, found)


def _passes(tables: list[list[float]], stage: Stage) -> float:
    layers, nodes = stage
    return math.fsum(n * tables[t][layers] for t, n in enumerate(nodes) if n)


def _stages(
    tables: list[list[float]], counts: tuple[int, ...], flow: float, layers: int, most: int
) -> list[Stage]:
    """Every stage that passes `flow` and of which no node could be left out; of those with the same nodes the
    longest; none if there are more than `most`."""
    longest: dict[tuple[int, ...], int] = {}
    for length in range(1, min(layers, max(len(t) for t in tables) - 1) + 1):
        passes = [t[length] if length < len(t) else 0.0 for t in tables]
        order = sorted((t for t in range(len(passes)) if passes[t] > 0), key=lambda t: (-passes[t], t))

        def add(position: int, missing: float, nodes: list[int], length=length, passes=passes, order=order):
            if position == len(order) or len(longest) > most:
                return
            kind = order[position]
            enough = math.ceil(missing / passes[kind] * (1 - 1e-12))
            if enough <= counts[kind]:
                longest[tuple(_with(nodes, kind, enough))] = length
            for number in range(min(enough - 1, counts[kind]), -1, -1):
                add(position + 1, missing - number * passes[kind], _with(nodes, kind, number))

        add(0, flow, [0] * len(tables))
    if len(longest) > most:
        return []
    return sorted(((length, nodes) for nodes, length in longest.items()), key=lambda s: (sum(s[1]), s))


def _with(nodes: list[int], kind: int, number: int) -> list[int]:
    changed = list(nodes)
    changed[kind] = number
    return changed


def _cover(stages: list[Stage], counts: tuple[int, ...], layers: int) -> list[Stage] | None:
    """Stages that cover all layers with these nodes at most; None if there are none."""
    best = np.zeros([count + 1 for count in counts], dtype=np.int32)
    for length, nodes in stages:
        after, before = (
            tuple(slice(n, None) for n in nodes),
            tuple(slice(0, c + 1 - n) for n, c in zip(nodes, counts, strict=True)),
        )
        for _ in range(min(c // n for n, c in zip(nodes, counts, strict=True) if n)):
            longer = best[before] + length
            if not (longer > best[after]).any():
                break
            np.maximum(best[after], longer, out=best[after])
        if best.flat[-1] >= layers:
            break
    if best.flat[-1] < layers:
        return None
    chosen, at = list[Stage](), tuple(counts)
    while best[at] > 0:
        for length, nodes in stages:
            left = tuple(a - n for a, n in zip(at, nodes, strict=True))
            if min(left) >= 0 and best[left] + length >= best[at]:
                chosen.append((length, nodes))
                at = left
                break
        else:  # Nodes of some kind are left over.
            at = next(
                smaller
                for t in range(len(at))
                if at[t] and best[smaller := (*at[:t], at[t] - 1, *at[t + 1 :])] == best[at]
            )
    return chosen


def _ranges(instance: Instance, kinds: list[int], tables: list[list[float]], stages: list[Stage]) -> Ranges:
    """The stages one after another, shortened at the end to the model's layers; nodes that are left over join
    the stage that passes least, if they fit."""
    free = {k: [node for node, kind in enumerate(instance.kind) if kind == k] for k in kinds}
    ranges = [NOTHING] * instance.nodes
    held: list[Range] = []
    first = 0
    # Those that pass most are shortened last.
    for length, nodes in sorted(stages, key=lambda stage: (-_passes(tables, stage), stage)):
        end = min(instance.layers, first + length)
        if end == first:
            continue
        held.append((first, end))
        for kind, number in zip(kinds, nodes, strict=True):
            for _ in range(number):
                ranges[free[kind].pop(0)] = (first, end)
        first = end
    for node in sorted(itertools.chain(*free.values())):
        able = [stage for stage in held if instance.tok_s(node, stage)]
        if able:
            ranges[node] = min(able, key=lambda stage: (_together(instance, ranges, stage), stage))
    return tuple(ranges)


def _together(instance: Instance, ranges: list[Range], stage: Range) -> float:
    return math.fsum(instance.tok_s(v, held) for v, held in enumerate(ranges) if held == stage)
