"""Ranges of layers are planned anew with what is left, by the strategy that made them."""

from __future__ import annotations

from pathlib import Path

import pytest

import hexgen2
from hexgen2.checks import violations
from hexgen2.strategies.registry import RANGES

CASE = f"{Path(__file__).parents[2] / 'support' / 'helix_case.json'}#small"
FEW = 4.0
"""Seconds for a search that would take a minute."""


def searched(strategy):
    limit = {"time_limit_s": FEW} if strategy == "helix" else {}
    return hexgen2.search(
        cluster="helix-single-24", model="llama-2-70b", workload="online", strategy=strategy, **limit
    )


@pytest.mark.parametrize("strategy", [name for name in RANGES if name != "separate-pipelines"])
def test_they_do_without_what_is_lost_and_take_back_what_returns(strategy):
    before = searched(strategy)
    gone = before.replicas[0].gpus
    after = hexgen2.replan(before, lost=gone, time_limit_s=FEW)
    assert violations(after) == [] and after.lost == gone and after.strategy == strategy
    assert not {gpu for replica in after.replicas for gpu in replica.gpus} & set(gone)
    assert after.layer_ranges is not None and after.migration is None and not after.moves
    if strategy != "helix":  # whose search is cut
        assert after.throughput.req_s <= before.throughput.req_s * (1 + 1e-9) or strategy == "petals"
        again = hexgen2.replan(after, added=gone)
        assert again.replicas == before.replicas and again.lost == []


def test_what_they_do_not_have_is_refused():
    with pytest.raises(hexgen2.InputError, match=r"--horizon: does not go with .* ranges of layers"):
        hexgen2.replan(searched("swarm"), horizon_s=60.0)
    given = hexgen2.search(case=CASE, strategy="helix", isl=100, osl=20)
    with pytest.raises(hexgen2.InputError, match=r"layer_ranges.tables: the tokens/s of nodes were given"):
        hexgen2.replan(given)
