"""Whole simulations, compared with queueing theory, the cost model and the placement's own predictions."""

from pathlib import Path

import numpy as np
import pytest
from pytest import approx
from searched import SETTING_1, searched

import hexgen2
from cluster_specs.loader import resolve
from cost_model.base import PREFILL_TOKENS, Work
from cost_model.errors import InputError
from cost_model.lengths import attended_tokens
from cost_model.registry import COST_MODELS, DEFAULT, make_cost_model
from hexgen2.cluster import Cluster
from hexgen2.moves import Move
from hexgen2.placement import Placement
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.fleet import LiveKvBudget
from hexgen2.simulator.options import Failure, Options, Replan
from hexgen2.simulator.records import Records
from hexgen2.simulator.run import simulate
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.arrivals import LengthSource, offline, online
from hexgen2.workload.requests import Requests


@pytest.fixture(scope="module")
def setting() -> Placement:
    return searched(*SETTING_1)


@pytest.fixture(scope="module")
def pair() -> Placement:
    return searched("hexgen2-case-study", "llama-2-13b", "HPLD")


@pytest.fixture(scope="module")
def colocated() -> Placement:
    return searched("hexgen2-case-study", "llama-2-13b", "HPLD", "vllm")


def run(placement: Placement, requests: Requests, **options) -> Simulation:
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    simulation = Simulation(placement, cluster, Records(requests), Options(**options))
    simulation.run()
    return simulation


def requests_of(*rows: tuple[float, int, int]) -> Requests:
    arrival_s, isl, osl = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(arrival_s.astype(float), isl, osl, "by hand")


def times_of(placement: Placement, replica_id: str) -> StepTimes:
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    costs = make_cost_model(placement.cost_model.name, placement.model, placement.workload.lengths)
    return StepTimes(placement.replica(replica_id), cluster, costs, "pipelined")


def test_nothing_is_held_and_nothing_is_lost_at_the_end(setting):
    simulation = run(setting, online(LengthSource(setting.workload), 8.0, 600, seed=1))
    records = simulation.records
    assert not np.isnan(records.end_s).any() and not records.failed
    assert all(budget.held_tokens == 0 and not budget.held for budget in simulation.kv_budgets.values())
    assert (records.first_s > records.requests.arrival_s).all()
    assert (records.end_s > records.first_s).all()
    # Every token except a request's first has a gap before it.
    assert sum(records.gaps) == records.requests.osl.sum() - len(records.requests)
    spans = (records.end_s - records.first_s).sum()
    assert np.dot(records.gap_s, records.gaps) == approx(spans, rel=1e-3)


def test_the_same_seed_gives_the_same_results(setting):
    asked = [online(LengthSource(setting.workload), 9.0, 300, seed=4) for _ in range(2)]
    assert simulate(setting, asked[0]) == simulate(setting, asked[1])


@pytest.mark.parametrize(("cost_model", "least"), [("calibrated", 0.96), ("vllm", 0.9)])
def test_at_full_load_it_serves_what_the_placement_promises(cost_model, least):
    """As many as predicted; a little more, since prefill makes the first of each request's tokens. Less,
    since requests hold places of a decode replica from their prefill on: at more requests/s, more."""
    placement = searched(*SETTING_1, cost_model=cost_model)
    found = simulate(placement, offline(LengthSource(placement.workload), 12_000, seed=0))
    assert least < found.steady_request_throughput / placement.throughput.req_s < 1.005


def test_traffic_follows_the_flows_of_the_placement(setting):
    found = simulate(setting, online(LengthSource(setting.workload), 3.0, 800, seed=2))
    total = sum(route.flow_req_s for route in setting.routes)
    for row, route in zip(found.routes, setting.routes, strict=True):
        assert row["requests"] == approx(800 * route.flow_req_s / total, abs=5)


def test_a_lone_request_takes_what_the_cost_model_says(pair):
    isl, osl = 700, 40
    simulation = run(pair, requests_of((0.0, isl, osl)))
    records = simulation.records
    prefill, decode = times_of(pair, records.prefill[0]), times_of(pair, records.decode[0])
    model = pair.model
    costs = make_cost_model(DEFAULT, model, LengthSource.load(None, isl, osl).workload.lengths)
    first = 0.0
    for j, (layers, group) in enumerate(zip(prefill.layers, prefill.groups, strict=True)):
        first += layers * costs.layer_s("prefill", group, 1)
        first += costs.edge_s("prefill", group, 1, j == prefill.stages - 1)
    first += sum(costs.hop_s("prefill", hop, 1) for hop in prefill.hops)
    assert records.first_s[0] == approx(first)
    steps = 0.0
    for made in range(1, osl):
        at = make_cost_model(DEFAULT, model, LengthSource.load(None, isl + made - 0.5, 1).workload.lengths)
        for j, (layers, group) in enumerate(zip(decode.layers, decode.groups, strict=True)):
            steps += layers * at.layer_s("decode", group, 1)
            steps += at.edge_s("decode", group, 1, j == decode.stages - 1)
        steps += sum(at.hop_s("decode", hop, 1) for hop in decode.hops)
    landed = records.routes[records.prefill[0], records.decode[0]].after_s
    assert landed > 0
    assert records.end_s[0] - records.first_s[0] == approx(landed + steps)


def step_s(times: StepTimes, chunks: list[tuple[int, int]], ends: int) -> float:
    """Seconds of a prefill step of one stage, for chunks (first, tokens), a number of which are the last of
    their prompt."""
    attended = sum(attended_tokens(tokens, None, first) for first, tokens in chunks)
    (seconds,), _ = times.step(Work(sum(tokens for _, tokens in chunks), attended, 0.0, 0.0, ends))
    return seconds


def test_a_prefill_replica_computes_prompts_in_chunks(pair):
    one = next(r for r in pair.replicas if r.role == "prefill" and len(r.stages) == 1)
    alone = pair.model_copy(update={"routes": [r for r in pair.routes if r.from_ == one.id][:1]})
    records = run(alone, requests_of((0.0, 3000, 9), (0.0, 1500, 9), (0.0, 500, 9))).records
    times = times_of(pair, one.id)
    # The first arrives alone: 2048 tokens of it, its rest with 1096 of the second, then what is left.
    first = step_s(times, [(0, 2048)], 0)
    second = first + step_s(times, [(2048, 952), (0, 1096)], 1)
    third = second + step_s(times, [(1096, 404), (0, 500)], 2)
    assert records.first_s == approx([second, third, third])


def test_a_request_is_let_in_by_what_those_who_decode_hold_at_that_time(pair):
    """One request of 700 + 400 tokens decodes. Another prompt of 700 fits beside it, with room for both to
    grow, as long as the first has made fewer than 100 tokens."""
    long = (0.0, 700, 400)
    lone = run(pair, requests_of(long)).records
    prefill, decode = lone.prefill[0], lone.decode[0]
    route = [r for r in pair.routes if (r.from_, r.to) == (prefill, decode)]
    alone = pair.model_copy(update={"routes": route})
    cluster = Cluster.from_spec(resolve(pair.cluster, "cluster", Path()))
    turns = times_of(pair, decode).decode_turn(1)
    landed = lone.first_s[0] + lone.routes[prefill, decode].after_s
    steps = np.cumsum([max(a + b * (701 + step) for a, b in turns) for step in range(399)])
    assert lone.end_s[0] == approx(landed + steps[-1])
    hundredth = landed + steps[98]
    for early_s, at_once in ((1e-4, True), (-1e-4, False)):
        asked = requests_of(long, (hundredth - early_s, 700, 2))
        simulation = Simulation(alone, cluster, Records(asked))
        budget = simulation.kv_budgets[decode]
        budget.kv_budget_tokens = 700 + 99 + 700 + 2 * budget.growth_tokens
        simulation.run()
        begun_s = simulation.records.first_s[1] - lone.first_s[0]
        assert begun_s == approx(asked.arrival_s[1] if at_once else lone.end_s[0])


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_where_answers_outgrow_their_room_requests_start_over_and_none_is_lost(setting, share):
    """Memory is too small for the load, and nothing is reserved for growth."""
    asked = online(LengthSource(setting.workload), 6.0, 400, seed=2)
    cluster = Cluster.from_spec(resolve(setting.cluster, "cluster", Path()))
    found = []
    for _ in range(2):
        simulation = Simulation(setting, cluster, Records(asked))
        for replica in setting.replicas:
            budget = simulation.kv_budgets[replica.id]
            budget.growth_tokens = 0
            if replica.role == "decode":
                budget.kv_budget_tokens = max(1600, int(share * budget.kv_budget_tokens))
        simulation.run()
        found.append(simulation)
    records = found[0].records
    assert sum(replica.preemptions for replica in records.replicas.values()) > 0
    assert not records.failed and not np.isnan(records.end_s).any()
    assert sum(records.gaps) == asked.osl.sum() - len(asked)
    spans = (records.end_s - records.first_s).sum()
    assert np.dot(records.gap_s, records.gaps) == approx(spans)
    for budget in found[0].kv_budgets.values():
        assert not budget.held and budget.held_tokens == 0
        assert not isinstance(budget, LiveKvBudget) or budget.grown() == 0
    assert records.end_s.tolist() == found[1].records.end_s.tolist()


class Scaled(COST_MODELS[DEFAULT]):
    """The default cost model with all times of layers and heads tripled."""

    def layer_work_s(self, group, work):
        return 3 * super().layer_work_s(group, work)

    def edge_work_s(self, group, sampled, last):
        return 3 * super().edge_work_s(group, sampled, last)


def test_times_can_come_from_elsewhere(pair):
    asked = requests_of((0.0, 700, 40))
    scaled = Scaled(pair.model, pair.workload.lengths)
    plain, slow = simulate(pair, asked), simulate(pair, asked, costs=scaled)
    assert slow.mean_ttft_ms == approx(3 * plain.mean_ttft_ms)
    assert slow.mean_itl_ms == approx(3 * plain.mean_itl_ms, rel=0.02)  # the transfer time is unchanged


def test_what_the_front_end_takes_delays_first_tokens_alone(pair):
    rate = 0.3 * pair.throughput.req_s
    asked = online(LengthSource(pair.workload), rate, 200, seed=0)
    plain, delayed = (simulate(pair, asked, Options(front_end_s=seconds)) for seconds in (0.0, 0.05))
    assert delayed.mean_ttft_ms == approx(plain.mean_ttft_ms + 50)
    assert delayed.p90_ttft_ms == approx(plain.p90_ttft_ms + 50)
    assert delayed.mean_tpot_ms == approx(plain.mean_tpot_ms)
    assert delayed.mean_e2el_ms == approx(plain.mean_e2el_ms + 50)


def test_a_prefill_replica_alone_is_an_m_d_1_queue(pair):
    """The Pollaczek-Khinchine formula, for single-token requests that each take one step."""
    one = next(replica for replica in pair.replicas if replica.role == "prefill")
    flows = [route for route in pair.routes if route.from_ == one.id]
    alone = pair.model_copy(update={"routes": flows})
    times = times_of(pair, one.id)
    assert times.stages == 1
    service = run(alone, requests_of((0.0, PREFILL_TOKENS, 1))).records.end_s[0]
    rate = 0.7 / service
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, size=20_000))
    ones = np.ones(20_000, dtype=int)
    requests = Requests(arrivals, PREFILL_TOKENS * ones, ones, "poisson")
    records = run(alone, requests).records
    waits = records.end_s - arrivals - service
    assert waits.mean() == approx(0.7 * service / (2 * (1 - 0.7)), rel=0.05)


def test_a_lost_replica_fails_its_requests_or_has_them_start_over(setting):
    decode = next(replica.id for replica in setting.replicas if replica.role == "decode")
    asked = online(LengthSource(setting.workload), 4.0, 400, seed=3)
    failure = [Failure(40.0, decode)]
    lost = run(setting, asked, failures=failure, recover=False)
    failed = set(lost.records.failed)
    assert failed and all(asked.arrival_s[k] <= 40.0 for k in failed)
    assert all(budget.held_tokens == 0 for budget in lost.kv_budgets.values())
    after = [name for name, at in zip(lost.records.decode, asked.arrival_s, strict=True) if at > 40.0]
    assert decode not in after
    recovered = run(setting, asked, failures=failure)
    assert not recovered.records.failed
    whole = recovered.records
    assert sum(whole.gaps) == asked.osl.sum() - len(asked)
    assert np.dot(whole.gap_s, whole.gaps) == approx((whole.end_s - whole.first_s).sum(), rel=1e-3)
    assert all(budget.held_tokens == 0 for budget in recovered.kv_budgets.values())


@pytest.mark.parametrize("policy", ["mixed", "prefill-first", "chunked"])
def test_a_lost_colocated_replica_has_its_requests_start_over(colocated, policy):
    asked = online(LengthSource(colocated.workload), 0.5 * colocated.throughput.req_s, 400, seed=1)
    middle = float(asked.arrival_s[200])
    for recover in (True, False):
        failures = [Failure(middle, colocated.replicas[0].id)]
        simulation = run(colocated, asked, policy=policy, failures=failures, recover=recover)
        records = simulation.records
        assert bool(records.failed) != recover
        assert all(budget.held_tokens == 0 for budget in simulation.kv_budgets.values())
    whole = run(colocated, asked, policy=policy, failures=failures, recover=True).records
    assert sum(whole.gaps) == asked.osl.sum() - len(asked)
    assert np.dot(whole.gap_s, whole.gaps) == approx((whole.end_s - whole.first_s).sum(), rel=3e-2)


def test_with_its_last_prefill_replica_everything_ends_with_a_reason(pair):
    prefill = [replica.id for replica in pair.replicas if replica.role == "prefill"]
    asked = online(LengthSource(pair.workload), 2.0, 100, seed=0)
    records = run(pair, asked, failures=[Failure(5.0, name) for name in prefill], recover=True).records
    assert len(records.failed) + (~np.isnan(records.end_s)).sum() == 100
    with pytest.raises(InputError):
        run(pair, asked, failures=[Failure(1.0, "nobody")])


@pytest.mark.parametrize("policy", ["mixed", "prefill-first", "chunked"])
def test_colocated_replicas_serve_everything_under_every_policy(colocated, policy):
    asked = online(LengthSource(colocated.workload), 0.6 * colocated.throughput.req_s, 500, seed=0)
    records = run(colocated, asked, policy=policy).records
    assert not records.failed and not np.isnan(records.end_s).any()
    assert sum(records.gaps) == asked.osl.sum() - len(asked)
    spans = (records.end_s - records.first_s).sum()
    assert np.dot(records.gap_s, records.gaps) == approx(spans, rel=2e-2)


def test_chunks_keep_the_longest_gaps_short(colocated):
    asked = online(LengthSource.load(None, 3000, 200), 0.5 * colocated.throughput.req_s, 300, seed=0)
    longest = {p: max(run(colocated, asked, policy=p).records.gap_s) for p in ("prefill-first", "chunked")}
    assert longest["chunked"] < longest["prefill-first"]


def test_when_kv_cache_runs_out_the_youngest_start_over_and_all_end(colocated):
    one = colocated.replicas[0]
    small = colocated.model_copy(update={"replicas": [one], "routes": []})
    simulation = run(small, requests_of(*((0.0, 60, 400) for _ in range(8))), policy="chunked")
    assert simulation.records.replicas[one.id].preemptions == 0
    cluster = Cluster.from_spec(resolve(small.cluster, "cluster", Path()))
    tight = Simulation(
        small, cluster, Records(requests_of(*((0.0, 60, 400) for _ in range(8)))), Options("chunked")
    )
    tight.kv_budgets[one.id].kv_budget_tokens = 1500
    tight.run()
    assert tight.records.replicas[one.id].preemptions > 0
    assert not np.isnan(tight.records.end_s).any()
    assert tight.records.end_s.max() > simulation.records.end_s.max()


def test_the_fleet_changes_over_to_another_placement_without_losing_anything(setting, tmp_path):
    path = tmp_path / "placement.json"
    setting.save(path)
    lost = setting.replicas[-1].gpus[0]
    following = hexgen2.replan(path, lost=lost)
    asked = online(LengthSource(setting.workload), 4.0, 800, seed=5)
    events = {"failures": [Failure(60.0, setting.replicas[-1].id)], "replans": [Replan(70.0, following)]}
    simulation = run(setting, asked, recover=True, **events)
    records = simulation.records
    assert not records.failed and not np.isnan(records.end_s).any()
    assert sum(records.gaps) == asked.osl.sum() - len(asked)
    assert all(budget.held_tokens == 0 for budget in simulation.kv_budgets.values())
    kept = {move.replica for move in following.moves if move.action == "keep"}
    gone = {replica.id for replica in setting.replicas} - kept
    loading = max(move.load_s + move.drain_s for move in following.moves)
    late = asked.arrival_s > 70.0 + loading + 60.0
    ends = {*np.array(records.prefill)[late], *np.array(records.decode)[late]}
    assert ends and not ends & gone
    running = {name for name, replica in simulation._running.items()}
    assert len(running) == len(following.replicas) and ends <= running


def test_requests_wait_while_no_replica_of_the_next_placement_stands(pair, colocated):
    """All replicas reload, from disaggregated to colocated: arrivals are held back and served afterwards."""
    moved = colocated.model_copy(deep=True)
    moved.moves = [
        Move.model_validate(
            {
                "action": "reload",
                "replica": r.id,
                "from": r.id,
                "gpus": r.gpus,
                "load_bytes": 0,
                "drain_s": 0,
                "load_s": 20.0,
            }
        )
        for r in moved.replicas
    ]
    asked = online(LengthSource(pair.workload), 5.0, 300, seed=0)
    records = run(pair, asked, replans=[Replan(10.0, moved)]).records
    assert not records.failed and not np.isnan(records.end_s).any()
    waiting = (asked.arrival_s > 10.0) & (asked.arrival_s < 29.0)
    assert waiting.any() and (records.first_s[waiting] > 30.0).all()


@pytest.mark.parametrize("cost_model", ["calibrated", "vllm"])
def test_steps_take_what_the_planner_reckoned_with(cost_model):
    """A decode replica at its full batch serves the rate that the placement states, or a little more: its
    memory also holds prompts that are being computed, so that the batch is not always full."""
    placement = searched(*SETTING_1, cost_model=cost_model)
    for replica in placement.replicas:
        if replica.role == "decode":
            times = times_of(placement, replica.id)
            costs = times.costs
            context = replica.max_batch * (costs.isl + costs.osl / 2)
            turn_s = max(a + b * context for a, b in times.decode_turn(replica.max_batch))
            reckoned = replica.max_batch / (turn_s * costs.osl) / replica.capacity_req_s
            assert 1 - 1e-6 < reckoned < 1.04
