"""Re-planning: what is kept, what moves cost, and that the best trade between the two is found."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from migration_oracle import brute_force, loads_of
from problems import problem_from, problems
from searched import SETTING_1, searched

from cost_model.errors import InfeasibleError, InputError
from cost_model.models import find_model
from hexgen2.checks import violations
from hexgen2.placement import Placement, json_schema
from hexgen2.replan.migration import Terms
from hexgen2.replan.request import replan_problem
from hexgen2.replan.search import replan
from hexgen2.search.planning.shards import Shard, shard_bytes, shared_bytes
from hexgen2.search.problem import Problem, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

OPTIONS = SearchOptions()
HOUR, FOREVER = Terms(), Terms(horizon_s=1e12)
CASE_STUDY = "hexgen2-case-study"


@pytest.fixture(scope="module")
def on_setting_1() -> Placement:
    return searched(*SETTING_1)


def found_on(problem: Problem, strategy: str = "hexgen2") -> Placement:
    return find_strategy(strategy)(problem, OPTIONS)


def checked(problem: Problem, previous: Placement, terms: Terms = HOUR) -> Placement:
    """Check every invariant of a re-plan: of the placement, of what it keeps, and of the moves' figures."""
    found = replan(problem, previous, OPTIONS, terms)
    assert violations(found) == []
    assert not set(found.lost) & {gpu for replica in found.replicas for gpu in replica.gpus}
    assert found.migration is not None
    old = {replica.id: replica for replica in previous.replicas}
    moves = {move.replica: move for move in found.moves if move.action != "stop"}
    assert sorted(moves) == sorted(replica.id for replica in found.replicas)
    ended = {move.replica for move in found.moves if move.action == "stop"}
    assert ended == set(old) - {move.from_ for move in moves.values()}
    for replica in found.replicas:
        move = moves[replica.id]
        assert move.gpus == replica.gpus
        before = old.get(move.from_ or "")
        if move.action == "keep":
            assert before and before.id == replica.id and before.role == replica.role
            assert before.stages == replica.stages and before.engine == replica.engine
            assert replica.role == "prefill" or before.max_batch == replica.max_batch
        elif move.action == "turn":
            assert before and before.stages == replica.stages
            now = replica.role, replica.max_batch, replica.engine
            assert (before.role, before.max_batch, before.engine) != now
            assert (move.load_bytes, move.load_s) == (0.0, terms.turn_s) and move.drain_s > 0
            assert (replica.id == before.id) == (replica.role == before.role)
        else:
            loads = loads_of(previous, found, replica.stages)
            assert move.load_bytes == pytest.approx(sum(loads), abs=1.0)
            assert move.load_s == pytest.approx(terms.restart_s + max(loads) / terms.load_bytes_s, rel=1e-6)
    if found.throughput.req_s == pytest.approx(found.migration.chosen.req_s):
        # The simulator did not have the last word on what replicas can do.
        expected = pytest.approx(missed(found, terms), rel=1e-4, abs=1e-6)
        assert found.migration.chosen.missed_requests == expected
    assert net(found) >= found.migration.unchanged_req_s * (1 - 1e-6)
    free = found.migration.free
    assert net(found) >= (free.req_s - free.missed_requests / terms.horizon_s) * (1 - 1e-6)
    assert free.req_s >= found.migration.chosen.req_s * (1 - 1e-6)
    return found


def net(placement: Placement) -> float:
    """By formulas: where links are nearly full, the simulator has the last word on the placement's own
    requests/s."""
    migration = placement.migration
    assert migration is not None
    return migration.chosen.req_s - migration.chosen.missed_requests / migration.horizon_s


def missed(placement: Placement, terms: Terms) -> float:
    """Requests missed, as a sum over the moments at which replicas come back."""
    absent = {move.replica: move.drain_s / 2 + move.load_s for move in placement.moves}
    times = sorted({0.0, terms.horizon_s, *(min(t, terms.horizon_s) for t in absent.values())})
    total = 0.0
    for start, end in itertools.pairwise(times):
        capacity = {"prefill": 0.0, "decode": 0.0, "colocated": 0.0}
        for replica in placement.replicas:
            if absent[replica.id] <= start:
                capacity[replica.role] += replica.capacity_req_s
        served = min(capacity["prefill"], capacity["decode"]) + capacity["colocated"]
        short = placement.migration.chosen.req_s - served
        # An infinite horizon would turn rounding errors into requests.
        total += short * (end - start) if short > 1e-9 * served else 0.0
    return total


@pytest.mark.parametrize("model,workload", [("llama-2-70b", "HPHD"), ("opt-30b", "LPHD")])
def test_nothing_lost_nothing_moves(model, workload):
    problem = make_problem(CASE_STUDY, model, workload)
    before = found_on(problem, "exact")
    after = checked(problem, before)
    assert {move.action for move in after.moves} == {"keep"}
    for key in ("replicas", "routes", "throughput", "latency", "lost", "bottlenecks"):
        assert getattr(after, key) == getattr(before, key)


@settings(max_examples=12, deadline=None)
@given(problems(max_gpus=7), st.data())
def test_losses(problem, data):
    """After the loss of any GPUs, the re-plan is valid, and its net value exceeds that of doing nothing and
    of the best plan that ignores moves (see `checked`)."""
    try:
        before = found_on(problem)
    except InfeasibleError:
        assume(False)
    ids = problem.cluster.gpu_ids
    lost = data.draw(st.sets(st.sampled_from(ids), min_size=1, max_size=3))
    after = replace(problem, lost=frozenset(lost))
    try:
        best = found_on(after, "exact")
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            replan(after, before, OPTIONS, Terms())
        return
    checked(after, before)
    # With unlimited time, moves cost nothing.
    patient = checked(after, before, FOREVER)
    assert patient.throughput.req_s >= 0.99 * best.throughput.req_s


@settings(max_examples=20, deadline=None)
@given(problems(max_gpus=5), st.data(), st.sampled_from([(120.0, 0.97), (3600.0, 0.995)]))
def test_net_value_against_brute_force(problem, data, horizon):
    """The re-plan is almost optimal: it keeps a running replica even where the replica's GPUs would let
    another one start sooner, which costs more at shorter horizons."""
    horizon_s, share = horizon
    try:
        before = found_on(problem, "exact")
    except InfeasibleError:
        assume(False)
    lost = data.draw(st.sampled_from(problem.cluster.gpu_ids))
    after, terms = replace(problem, lost=frozenset([lost])), Terms(horizon_s=horizon_s)
    best = brute_force(after, before, terms)
    if best == 0:
        return
    assert net(checked(after, before, terms)) >= share * best


def test_a_lost_node_that_comes_back():
    """Without the node throughput falls; with it and enough time, it is restored in full; lost GPUs are
    remembered in between."""
    problem = make_problem(CASE_STUDY, "opt-30b", "HPHD")
    first = found_on(problem, "exact")
    node = problem.cluster.node_names[0]
    less = checked(replan_problem(first, lost=node), first)
    assert all(gpu.startswith(f"{node}/") for gpu in less.lost) and less.lost
    assert less.throughput.req_s < first.throughput.req_s
    still = checked(replan_problem(less, workload="HPHD"), less)
    assert still.lost == less.lost
    back = checked(replan_problem(less, added=node), less, FOREVER)
    assert back.lost == []
    assert back.throughput.req_s == pytest.approx(first.throughput.req_s, rel=1e-6)


def test_a_short_horizon_moves_nothing_and_a_long_one_does():
    before = found_on(make_problem(CASE_STUDY, "llama-2-70b", "HPLD"))
    after = replan_problem(before, workload="LPHD")
    hasty = checked(after, before, Terms(horizon_s=1.0))
    assert {move.action for move in hasty.moves} <= {"keep", "stop"}
    patient = checked(after, before, FOREVER)
    assert patient.throughput.req_s > hasty.throughput.req_s * 1.01
    assert patient.throughput.req_s == pytest.approx(found_on(after, "exact").throughput.req_s, rel=1e-6)


def test_colocated_replicas_that_run_go_on():
    """A re-plan can start from another strategy's placement."""
    problem = make_problem(CASE_STUDY, "llama-2-13b", "LPLD")
    before = found_on(problem, "vllm")
    lost = before.replicas[0].gpus[0]
    found = checked(replan_problem(before, lost=lost), before, Terms(horizon_s=30.0))
    kept = {move.replica for move in found.moves if move.action == "keep"}
    assert kept and all(found.replica(name).role == "colocated" for name in kept)


def test_a_change_of_roles_loads_nothing():
    """Where one GPU holds the model, a longer prompt asks for other batches, so that decode replicas have to
    empty. Prefill replicas, which are empty at once, decode in their place; that pays because it is quick."""
    nodes = [{"name": name, "accelerators": "A100-80GB:1"} for name in "abcd"]
    before = found_on(problem_from({"name": "four", "nodes": nodes}, "llama-2-7b", "LPLD"))
    problem = replan_problem(before, workload="HPLD")
    after = replan(problem, before, OPTIONS, Terms())
    assert violations(after) == []
    assert {move.action for move in after.moves} == {"keep", "turn"}
    changed = {(before.replica(m.from_).role, after.replica(m.replica).role) for m in after.moves}
    assert {("prefill", "decode"), ("decode", "prefill")} <= changed
    assert after.migration.chosen.load_bytes == 0
    slow = replan(problem, before, OPTIONS, Terms(turn_s=10.0))
    assert after.migration.chosen.missed_requests < slow.migration.chosen.missed_requests / 5


def test_a_larger_cluster_from_nothing():
    """On GPUs that hold nothing, every replica loads the whole model, and the old replicas are lost."""
    nodes = [{"name": name, "accelerators": "A100-80GB:4"} for name in ("a", "b")]
    before = found_on(problem_from({"name": "old", "nodes": nodes[:1]}, "llama-2-13b", "LPLD"))
    problem = problem_from({"name": "new", "nodes": nodes[1:]}, "llama-2-13b", "LPLD")
    after = checked(problem, before)
    assert {move.action for move in after.moves} == {"start", "stop"}
    model = find_model("llama-2-13b")
    assert sum(move.load_bytes for move in after.moves) == pytest.approx(
        len(after.replicas) * model.total_params * model.weight_bytes
    )


def test_a_node_whose_cards_changed_holds_nothing():
    nodes = [{"name": name, "accelerators": "A100-80GB:2"} for name in ("a", "b")]
    before = found_on(problem_from({"name": "old", "nodes": nodes}, "llama-2-13b", "LPLD"))
    nodes[1] = {"name": "b", "accelerators": "H100:2"}
    after = checked(problem_from({"name": "new", "nodes": nodes}, "llama-2-13b", "LPLD"), before)
    for move in after.moves:
        assert move.action != "keep" or not any(gpu.startswith("b/") for gpu in move.gpus)


def test_a_replan_is_within_the_schema(on_setting_1):
    found = checked(replan_problem(on_setting_1, lost="l40-2/1,h100-1"), on_setting_1)
    jsonschema.validate(json.loads(found.to_json()), json_schema())
    assert found.lost == ["h100-1/0", "h100-1/1", "l40-2/1"]


@given(st.data())
def test_shared_bytes_count_every_weight_once(data):
    """Compared with a count by cells: the layers that both hold, and the part of each that both hold."""
    model = find_model(data.draw(st.sampled_from(["llama-2-13b", "opt-30b"])))

    def shard() -> Shard:
        first = data.draw(st.integers(0, model.layers - 1))
        end, degree = (
            data.draw(st.integers(first + 1, model.layers)),
            data.draw(st.sampled_from([1, 2, 3, 4, 8])),
        )
        rank = data.draw(st.integers(0, degree - 1))
        return Shard(first, end, rank, degree, first == 0, end == model.layers)

    one, two = shard(), shard()
    parts = 24
    common = set(range(one.first, one.end)) & set(range(two.first, two.end))
    both = [
        c
        for c in range(parts)
        if all(s.rank * parts <= c * s.degree < (s.rank + 1) * parts for s in (one, two))
    ]
    if not (one.at_start or one.at_end):
        expected = len(common) * model.layer_params * len(both) / parts * model.weight_bytes
        assert shared_bytes(model, one, two) == pytest.approx(expected)
    assert shared_bytes(model, one, two) <= min(shard_bytes(model, one), shard_bytes(model, two)) * (1 + 1e-9)
    whole = [Shard(0, model.layers, rank, 4, True, True) for rank in range(4)]
    assert sum(shard_bytes(model, s) for s in whole) == model.total_params * model.weight_bytes


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({"lost": "h100-9/0"}, "h100-1"),
        ({"lost": "h100-1/7"}, "h100-1/"),
        ({"lost": "h100-1/0", "added": "l40-1/0"}, "not lost"),
        ({"lost": "a6000-1/0", "added": "a6000-1"}, "also in --lost"),
        ({"model": "opt-30b"}, "new search"),
        ({"osl": 50.0}, "--isl"),
    ],
)
def test_wrong_changes(on_setting_1, changes, expected):
    before = on_setting_1.model_copy(update={"lost": ["a6000-1/0"]})
    with pytest.raises(InputError, match=expected):
        replan_problem(before, **changes)
