"""What benchmarks.search.aiconfigurator reads of AIConfigurator's files, and makes of it."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from benchmarks.search.aiconfigurator import (
    Case,
    Pool,
    Theirs,
    as_placement,
    best_of,
    drawn,
    text_of_replicas,
)

CASE = Case("H100", 16, "llama-3.1-8b", 1024, 128, 1000, 50)
COLOCATED = {"tokens/s/gpu_cluster": 320.5, "num_total_gpus": 4, "tp": 4}
DIVIDED = {
    "tokens/s/gpu_cluster": 410.0,
    "num_total_gpus": 8,
    "(p)tp": 2,
    "(p)workers": 2,
    "(d)tp": 4,
    "(d)workers": 1,
}


def write(folder, rows):
    folder.mkdir()
    with (folder / "best_config_topn.csv").open("w", newline="") as file:
        out = csv.DictWriter(file, rows[0])
        out.writeheader()
        out.writerows(rows)


def test_the_best_plan_of_both_modes_is_read_and_copied_until_the_cluster_is_full(tmp_path):
    assert best_of(CASE, tmp_path) is None
    write(tmp_path / "agg", [COLOCATED, COLOCATED | {"tp": 8}])
    assert best_of(CASE, tmp_path) == Theirs((Pool("colocated", 4, 4),), 320.5)
    write(tmp_path / "disagg", [DIVIDED])
    assert best_of(CASE, tmp_path) == Theirs((Pool("prefill", 2, 4), Pool("decode", 4, 2)), 410.0)


@pytest.mark.parametrize("pools", [(Pool("colocated", 4, 4),), (Pool("prefill", 2, 4), Pool("decode", 4, 2))])
def test_a_plan_becomes_a_placement_of_one_stage_each_inside_nodes(pools):
    found = as_placement(CASE, Theirs(pools, 0.0))
    assert found is not None and found.goodput is not None and found.goodput.goodput_req_s > 0
    made = sorted((r.role, len(r.stages[0].gpus)) for r in found.replicas)
    assert made == sorted((pool.role, pool.tensor) for pool in pools for _ in range(pool.replicas))
    for replica in found.replicas:
        (stage,) = replica.stages
        assert len({gpu.split("/")[0] for gpu in stage.gpus}) == 1
    assert text_of_replicas(found).count("tp") == len(pools)


def test_a_plan_that_misses_the_targets_has_no_placement():
    assert as_placement(replace(CASE, ttft_ms=1), Theirs((Pool("colocated", 1, 16),), 1.0)) is None


def test_cases_are_the_same_for_the_same_seed():
    assert [drawn(seed) for seed in range(5)] == [drawn(seed) for seed in range(5)]
