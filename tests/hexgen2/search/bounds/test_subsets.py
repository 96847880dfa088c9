"""The best division of every part of some nodes, compared with trying all of them."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from hexgen2.search.bounds.subsets import Subsets


def worths(sizes: list[int], seed: int) -> np.ndarray:
    """[parts] random worths of groups, many of which are worth nothing."""
    rng = np.random.default_rng(seed)
    parts = len(Subsets(sizes))
    found = np.where(rng.random(parts) < 0.5, rng.random(parts), 0.0)
    found[0] = 0.0
    return found


def by_trying(sizes: list[int], worth: np.ndarray) -> dict[tuple[int, ...], float]:
    """What the groups in each part are worth at most: of any group in it, and the rest."""
    subsets = Subsets(sizes)
    number = {tuple(counts): k for k, counts in enumerate(subsets.counts.tolist())}

    @cache
    def best(part: tuple[int, ...]) -> float:
        groups = [group for group in itertools.product(*(range(n + 1) for n in part)) if any(group)]
        rests = [tuple(n - m for n, m in zip(part, group, strict=True)) for group in groups]
        return max((worth[number[g]] + best(r) for g, r in zip(groups, rests, strict=True)), default=0.0)

    return {part: best(part) for part in number}


@pytest.mark.parametrize("sizes", [[1], [3], [1, 1, 1, 1, 1], [2, 1, 2], [1, 2, 1, 3], [2, 2, 2, 1]])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_part_is_divided_as_well_as_can_be(sizes, seed):
    subsets, worth = Subsets(sizes), worths(sizes, seed)
    both = np.stack([worth, 2 * worth[::-1] * (np.arange(len(worth)) > 0)], axis=1)
    best = subsets.best(both, lambda: False)
    for case in range(2):
        tried = by_trying(sizes, both[:, case])
        for number, counts in enumerate(subsets.counts.tolist()):
            assert best[number, case] == pytest.approx(tried[tuple(counts)])
            groups = subsets.partition(both[:, case], best[:, case], number)
            assert both[groups, case].sum() == pytest.approx(best[number, case])
            assert (subsets.counts[groups].sum(axis=0) <= counts).all()


def test_groups_on_the_last_node_are_all_there_are():
    subsets = Subsets([2, 1, 2])
    for part, counts in enumerate(subsets.counts.tolist()):
        if not part:
            continue
        last = max(node for node, count in enumerate(counts) if count)
        wanted = {
            number
            for number, some in enumerate(subsets.counts.tolist())
            if some[last] and all(m <= n for m, n in zip(some, counts, strict=True))
        }
        found = subsets.groups_on_last(part).tolist()
        assert set(found) == wanted and len(found) == len(wanted)


def test_pairs_are_counted_and_a_stop_is_obeyed():
    sizes = [1, 2, 1]
    subsets = Subsets(sizes)
    within = sum((a <= b).all() for a in subsets.counts for b in subsets.counts)
    assert Subsets.pairs(sizes) == within
    assert subsets.best(np.zeros((len(subsets), 1)), lambda: True) is None
