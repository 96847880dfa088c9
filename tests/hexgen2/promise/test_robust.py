"""Finalists under cost errors: where the answer is known, and as a user asks for it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from commands import hexgen2 as run
from commands import refused
from hypothesis import given
from hypothesis import strategies as st
from problems import problem_from

import hexgen2
from hexgen2.placement import Placement
from hexgen2.promise import robust
from hexgen2.promise.cost_errors import CostErrors
from hexgen2.promise.planned import planned_req_s
from hexgen2.promise.quick_goodput import quick_goodput
from hexgen2.promise.robust import RobustEffort, choice, compare_under_errors, regrets, tenth
from hexgen2.promise.trial import Trial
from hexgen2.search.problem import Problem, make_problem
from hexgen2.search.stopping import Stopping
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.requests import Requests

QUICK = RobustEffort(perturbations=10, finalists=3, calculated_perturbations=60, requests=200, runs=4)
CASE = {"cluster": "hexgen2-case-study", "model": "llama-2-13b", "workload": "HPLD"}
ON_CASE = ["--cluster", "hexgen2-case-study", "--model", "opt-30b", "--workload", "LPLD"]
TARGETS = {"ttft_ms": 800.0, "tpot_ms": 50.0}
APART = {
    "name": "apart",
    "nodes": [
        {"name": "a", "accelerators": "H100:2", "interconnect": "nvlink"},
        {"name": "b", "accelerators": "A100-80GB:2", "interconnect": "nvlink"},
    ],
    "network": {"default": {"bandwidth_gbit_s": 25, "latency_us": 20}},
}
"""KV caches may stay inside the nodes, or cross a link that is just fast enough."""
SLOW = {"default": {"bandwidth_gbit_s": 0.2, "latency_us": 20}}


@pytest.fixture(scope="module")
def apart() -> tuple[Problem, list[Placement]]:
    """A placement that relies on the link, and one that was made as if there were hardly any."""
    problems = [problem_from({**APART, **more}, "opt-30b", "HPLD") for more in ({}, {"network": SLOW})]
    crossing, inside = (find_strategy("hexgen2")(problem, SearchOptions()) for problem in problems)
    return problems[0], [crossing, inside.model_copy(update={"cluster": crossing.cluster})]


@pytest.fixture(scope="module")
def in_time() -> Placement:
    return hexgen2.search(**CASE, objective="goodput", phases="disaggregated", **TARGETS)


@dataclass
class Scripted:
    """Runs whose late share grows exponentially until the fleet is full; `least` of them are always late."""

    limit: float
    growth: float
    least: float = 0.0
    rates: list[float] = field(default_factory=list)

    def run(self, rate: float, count: int, draw: int) -> Trial:
        assert draw == 0
        self.rates.append(rate)
        late = max(self.least, min(1.0, 0.1 * math.exp(min(50.0, self.growth * (rate / self.limit - 1)))))
        in_time = (np.arange(count) * 7919) % count >= round(late * count)
        nothing = np.zeros(count)
        return Trial(rate, Requests(nothing, nothing, nothing, ""), in_time, nothing, nothing, nothing, True)


@given(st.floats(0.01, 1000), st.floats(5, 60), st.floats(0.4, 2.5))
def test_a_goodput_is_found_from_far_off(limit, growth, start):
    runs = Scripted(limit, growth)
    assert quick_goodput(runs, 0.9, start * limit, 1000, 7) == pytest.approx(limit, rel=0.1)


def test_what_is_never_in_time_is_seen_at_once():
    runs = Scripted(5.0, 20.0, least=0.6)
    assert quick_goodput(runs, 0.9, 4.0, 1000, 6) == 0.0 and len(runs.rates) == 2


def test_no_more_is_looked_for_than_arrives():
    runs = Scripted(5.0, 20.0)
    assert quick_goodput(runs, 0.9, 4.0, 1000, 6, most_req_s=4.5) == 4.5 and max(runs.rates) == 4.5


def test_percentile_regret_and_choice():
    steady, risky = np.full(20, 8.0), np.array([20.0] * 15 + [1.0] * 5)
    values = np.stack([risky, steady], axis=1)
    assert risky.mean() > steady.mean() and choice(values) == 1
    assert tenth(np.arange(1.0, 21.0)) == 3.0
    assert regrets(values)[0] == pytest.approx([0, 0.6]) and regrets(values)[-1] == pytest.approx([0.875, 0])
    assert not regrets(np.zeros((2, 2))).any()
    # Where nine of ten reach nothing, the mean decides; and what is within the noise is no better.
    hopeless = np.stack([np.r_[np.zeros(5), np.full(15, 2.0)], np.r_[np.zeros(5), np.full(15, 3.0)]], axis=1)
    assert choice(hopeless) == 1
    assert choice(np.stack([steady, steady * 1.005], axis=1)) == 0


@pytest.mark.parametrize(
    ("strategy", "cluster", "model", "workload"),
    [
        ("hexgen2", "hexgen2-setting-1", "llama-2-70b", "HPHD"),
        ("hexgen2", "hexgen2-setting-4", "opt-30b", "LPLD"),
        ("vllm", "hexgen2-setting-2", "opt-30b", "online"),
    ],
)
def test_without_errors_a_placement_carries_what_its_search_says(strategy, cluster, model, workload):
    problem = make_problem(cluster, model, workload)
    placement = find_strategy(strategy)(problem, SearchOptions(0, 2.0))
    (carried,) = planned_req_s([placement], problem.cluster, problem.costs)
    assert carried == pytest.approx(placement.throughput.req_s)


def test_seconds_times_a_factor_carry_so_much_less(apart):
    """As far as the GPUs are the limit: the link is to be no limit here."""
    problem, placements = apart
    quick = {"default": {"bandwidth_gbit_s": 4000, "latency_us": 0}}
    cluster = problem_from({**APART, "network": quick}, "opt-30b", "HPLD").cluster
    before = planned_req_s(placements, cluster, problem.costs)
    for draw in CostErrors({"H100": 0.3, "A100-80GB": 0.3}, {}, 0.0).draws(cluster, 3, 6):
        factors = [factor for pair in draw.gpu_factors().values() for factor in pair]
        after = planned_req_s(placements, draw.cluster(cluster), draw.costs(problem.costs))
        for one, other in zip(before, after, strict=True):
            assert one / max(factors) * (1 - 1e-9) <= other <= one / min(factors) * (1 + 1e-9)


def test_without_errors_every_perturbation_is_the_nominal(apart, in_time):
    problem, placements = apart
    cases = [(placements, problem.cluster), ([in_time], cluster_of(in_time))]
    for found, cluster in cases:
        errors = CostErrors.of(found[0].costs(), cluster).times(0.0)
        compared = compare_under_errors(found, cluster, 0, Stopping(), QUICK, errors)
        first = compared.record.finalists[0]
        assert compared.chosen == 0 and first.best_share == 1 and first.worst_regret == 0
        for one in compared.record.finalists:
            assert one.nominal == one.p10 and one.mean == pytest.approx(one.nominal)
            assert one.worst_regret == pytest.approx(1 - one.nominal / first.nominal)


def cluster_of(placement: Placement):
    return make_problem(placement.cluster, placement.model, placement.workload).cluster


def test_larger_errors_spread_more(apart):
    problem, placements = apart
    stated = CostErrors.of(problem.costs, problem.cluster)
    p10 = [
        compare_under_errors(placements, problem.cluster, 0, Stopping(), QUICK, stated.times(times))
        .record.finalists[0]
        .p10
        for times in (0.0, 0.5, 1.0, 2.0)
    ]
    assert p10 == sorted(p10, reverse=True) and p10[-1] < 0.8 * p10[0]


def test_who_relies_on_an_uncertain_link_is_not_chosen(apart):
    """It is the best without errors, and on average; but not nine times out of ten."""
    problem, placements = apart
    certain, uncertain = CostErrors({}, {}, 0.05), CostErrors({}, {}, 0.6)
    compared = [
        compare_under_errors(placements, problem.cluster, 0, Stopping(), QUICK, errors)
        for errors in (certain, uncertain)
    ]
    assert [one.chosen for one in compared] == [0, 1] and compared[1].placement is placements[1]
    crossing, inside = compared[1].record.finalists
    assert crossing.nominal > 1.2 * inside.nominal and crossing.mean > 1.05 * inside.mean
    assert inside.p10 == pytest.approx(inside.nominal) and inside.p10 > 1.5 * crossing.p10
    assert compared[1].record.chosen is inside and inside.worst_regret < crossing.worst_regret


def test_a_search_compares_its_finalists(apart):
    problem, _ = apart
    found = find_strategy("hexgen2")(problem, SearchOptions(robust=True))
    record = found.robustness
    assert len(record.finalists) > 1 and record.chosen.nominal == pytest.approx(found.throughput.req_s)
    assert record.finalists[0].nominal == pytest.approx(max(one.nominal for one in record.finalists))
    assert record.chosen.p10 >= max(one.p10 for one in record.finalists) / 1.01


def test_what_was_found_for_slower_costs_is_compared_too(apart):
    problem, placements = apart
    slower = CostErrors.of(problem.costs, problem.cluster).slower(problem.cluster, 1.0)
    assert all(factor > 1.2 for pair in slower.gpu_factors().values() for factor in pair)
    links = slower.cluster(problem.cluster).card_bytes_s / problem.cluster.card_bytes_s
    assert links == pytest.approx([links[0]] * 2) and links[0] < 0.8
    few = replace(QUICK, calculated_finalists=2)
    crossing, inside = placements
    compared = compare_under_errors(
        [crossing, crossing, crossing], problem.cluster, 0, Stopping(), few, cautious=[inside]
    )
    assert compared.placements == [crossing, inside]


def test_the_same_seed_gives_the_same_record(apart):
    problem, placements = apart
    one, same, other = (
        compare_under_errors(placements, problem.cluster, seed, Stopping(), QUICK).record
        for seed in (1, 1, 2)
    )
    assert one == same != other


def test_out_of_time_the_best_without_errors_is_the_answer(apart):
    problem, placements = apart
    compared = compare_under_errors(placements, problem.cluster, 0, Stopping(1e-9), QUICK)
    assert compared.chosen == 0 and compared.record.perturbations == 0 and not compared.record.finalists


@pytest.mark.parametrize("calls", [1, 5, 30])
def test_ctrl_c_keeps_what_was_found(apart, calls, monkeypatch):
    problem, placements = apart
    made = []

    def interrupted(*arguments):
        made.append(1)
        if len(made) > calls:
            raise KeyboardInterrupt
        return planned_req_s(*arguments)

    monkeypatch.setattr(robust, "planned_req_s", interrupted)
    stopping = Stopping()
    compared = compare_under_errors(placements, problem.cluster, 0, stopping, QUICK)
    assert stopping.cut == "interrupted" and compared.record.perturbations == calls - 1
    assert (compared.record.chosen is None) == (calls == 1)


def test_latency_is_compared_at_the_rate_that_arrives(in_time):
    goal = hexgen2.Goal(objective="latency", request_rate=2.0)
    slow = in_time.model_copy(
        update={
            "goal": goal,
            "replicas": [
                r.model_copy(update={"engine": r.engine.model_copy(update={"step_tokens": 64})})
                if r.role == "prefill"
                else r
                for r in in_time.replicas
            ],
        }
    )
    quick = in_time.model_copy(update={"goal": goal})
    compared = compare_under_errors([slow, quick], cluster_of(quick), 0, Stopping(), QUICK)
    first, second = compared.record.finalists
    assert compared.chosen == 1 and compared.record.measure == "mean_e2el_s"
    assert second.nominal < first.nominal and second.p10 >= second.nominal and first.worst_regret > 0


def test_a_goodput_under_errors_is_near_that_without(in_time):
    longer = replace(QUICK, requests=1500)
    compared = compare_under_errors([in_time], cluster_of(in_time), 0, Stopping(), longer)
    (one,) = compared.record.finalists
    assert one.nominal == pytest.approx(in_time.goodput.goodput_req_s, rel=0.15)
    assert one.p10 < one.nominal and one.best_share == 1 and one.mean_regret == 0


def test_the_command_writes_and_prints_it(tmp_path):
    path = tmp_path / "placement.json"
    options = ["--cluster", "hexgen2-case-study", "--model", "llama-2-70b", "--workload", "HPHD"]
    first = run("search", *options, "--phases", "disaggregated", "--robust", "-o", str(path))
    assert first.returncode == 0, first.stderr
    assert "robust      " in first.stdout and "10th percentile" in first.stdout
    shown = run("show", str(path))
    assert shown.stdout == first.stdout
    record = json.loads(path.read_text())["robustness"]
    assert record["perturbations"] > 100 and sum(one["chosen"] for one in record["finalists"]) == 1
    assert any("assumed" in error["source"] for error in record["errors"])
    plain = hexgen2.search(cluster="hexgen2-case-study", model="llama-2-70b", workload="HPHD")
    assert plain.robustness is None and "robustness" not in plain.model_dump(mode="json")


@pytest.mark.parametrize(
    "options",
    [["--budget", "9"], ["--strategy", "vllm"], ["--objective", "cost", "--request-rate", "1"]],
)
def test_it_is_refused_where_it_makes_no_sense(options):
    options = [*ON_CASE, *options]
    assert "--robust" in refused(run("search", *options, "--robust"))


def test_a_re_plan_refuses_it(tmp_path, in_time):
    path = tmp_path / "placement.json"
    in_time.save(path)
    assert "--robust" in refused(run("search", "--from", str(path), "--robust"))
