"""Long prompts for remote routes: as many tokens as planned, fewer requests, only where possible."""

import functools
import math

import numpy as np
import pytest

import hexgen2
from cost_model.lengths import RequestLengths
from hexgen2.checks import check_names, factors_of, violations
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.promise import finalists
from hexgen2.promise.finalists import Effort
from hexgen2.promise.keep import with_promise
from hexgen2.promise.length_split import split_by_length
from hexgen2.simulator.options import Failure, Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.arrivals import LengthSource, online
from hexgen2.workload.classes import load_workload
from hexgen2.workload.prompt_limits import divided, long_prompts, prompt_factors
from runtime.routing import load_shift
from runtime.routing.load_shift import LoadShift
from runtime.routing.reflow import Reflow
from runtime.routing.router import routes_of

LENGTHS = RequestLengths.of([(100, 50, 3.0), (1000, 50, 1.0)])  # 325 tokens on average


@functools.cache
def placed():
    """Mixed replicas with routes to themselves and from others."""
    return hexgen2.search(
        cluster="hexgen2-setting-3", model="opt-30b", workload="online", phases="flexible", seed=5
    )


@functools.cache
def limited():
    found = split_by_length(placed())
    assert found is not None
    return found


def tokens_s(placement, route, factor):
    return route.flow_req_s * factor * placement.workload.isl


def test_long_prompts_have_their_share_and_length():
    assert long_prompts(LENGTHS, 101) == (0.25, pytest.approx(1000 / 325))
    assert long_prompts(LENGTHS, 100) == (1.0, pytest.approx(1.0))
    assert long_prompts(LENGTHS, 1001) == (0.0, 1.0)


def test_routes_without_limits_have_all_lengths():
    assert prompt_factors(LENGTHS, [(1.0, 0), (2.0, 0)]) == [1.0, 1.0]
    assert prompt_factors(LENGTHS, []) == []


def test_a_route_for_long_prompts_leaves_the_short_ones_to_others():
    long, rest = prompt_factors(LENGTHS, [(0.2, 500), (0.8, 0)])
    assert long == pytest.approx(1000 / 325)
    assert 0.2 * long + 0.8 * rest == pytest.approx(1.0)


def test_flows_are_divided_by_tokens_and_only_if_there_are_long_prompts_enough():
    local, remote = ("m", "m"), ("p", "m")
    flows, limits = divided(LENGTHS, {local: 6.0, remote: 4.0}, {remote: 500})
    assert limits == {remote: 500} and flows[remote] == pytest.approx(4.0 * 325 / 1000)
    assert sum(flows.values()) == pytest.approx(10.0)
    too_much = {local: 1.0, remote: 9.0}
    assert divided(LENGTHS, too_much, {remote: 500}) == (too_much, {})
    alone = {remote: 4.0}  # Nobody else takes the short ones.
    assert divided(LENGTHS, alone, {remote: 500}) == (alone, {})


def test_remote_routes_get_as_many_tokens_and_every_check_passes():
    before, after = placed(), limited()
    assert violations(after) == []
    changed = [r for r in after.routes if r.min_prompt_tokens]
    assert changed and all(r.from_ != r.to for r in changed)
    scale = after.throughput.req_s / before.throughput.req_s  # a little less, if a replica would be too busy
    assert 0.9 < scale <= 1 + 1e-9
    factors = factors_of(after.workload.lengths, after.replicas, after.routes)
    for was, now, factor in zip(before.routes, after.routes, factors, strict=True):
        if now.min_prompt_tokens:
            assert now.flow_req_s < was.flow_req_s * scale
            assert tokens_s(after, now, factor) == pytest.approx(tokens_s(before, was, scale), rel=1e-4)


@pytest.mark.parametrize("workload", ["HPHD", "LPLD"])
def test_fixed_lengths_are_left_alone(workload):
    fixed = placed().model_copy(update={"workload": load_workload(workload)})
    assert split_by_length(placed()) is not None and split_by_length(fixed) is None


def test_the_file_keeps_the_limits_and_says_nothing_of_none(tmp_path):
    limited().save(tmp_path / "p.json")
    assert Placement.load(tmp_path / "p.json") == limited()
    assert "min_prompt_tokens" in limited().to_json()
    assert "min_prompt_tokens" not in placed().to_json()


def test_a_placement_whose_routes_all_refuse_short_prompts_is_refused():
    routes = [r.model_copy(update={"min_prompt_tokens": 10}) for r in placed().routes]
    found = list(check_names(placed().model_copy(update={"routes": routes})))
    assert found == [("routes", "none takes short prompts: one needs min_prompt_tokens 0")]


def simulated(placement, count=2000, options=None):
    requests = online(LengthSource(placement.workload), 0.6 * placement.throughput.req_s, count, (3,))
    records = Records(requests)
    Simulation(placement, Cluster.from_spec(placement.cluster), records, options or Options()).run()
    assert not records.failed and not np.isnan(records.end_s).any()
    return records


def test_in_the_simulator_long_prompts_take_their_routes_and_routes_have_their_shares():
    placement = limited()
    records = simulated(placement, 4000)
    least = {(r.from_, r.to): r.min_prompt_tokens for r in placement.routes}
    flows = {(r.from_, r.to): r.flow_req_s / placement.throughput.req_s for r in placement.routes}
    taken = dict.fromkeys(least, 0)
    for prefill, decode, tokens in zip(records.prefill, records.decode, records.requests.isl, strict=True):
        assert tokens >= least[prefill, decode]
        taken[prefill, decode] += 1
    for pair, share in flows.items():
        assert taken[pair] / 4000 == pytest.approx(share, abs=0.03)


def test_nothing_is_stranded_by_losses():
    placement = limited()
    for replica in placement.replicas:
        simulated(placement, 800, Options(failures=[Failure(20.0, replica.id)]))


def test_after_a_loss_short_prompts_have_routes_and_the_live_placement_passes_its_checks():
    placement = limited()
    reflow = Reflow(placement)
    assert reflow.routes(()) == routes_of(placement)
    for replica in placement.replicas:
        left = reflow.routes({replica.id})
        targets = {r.decode for r in left if r.weight > 0}
        for target in targets:
            own = [r for r in left if r.decode == target and r.weight > 0]
            assert any(not r.min_prompt_tokens for r in own)
        assert math.fsum(r.weight for r in left) > 0
        assert violations(reflow.placement({replica.id})) == []


def test_limits_move_with_the_lengths_of_prompts(monkeypatch):
    monkeypatch.setattr(load_shift, "WORTHWHILE", -1.0)
    placement = limited()
    shift = LoadShift(placement)
    rng = np.random.default_rng(0)
    isl, _ = LengthSource(placement.workload).sample(rng, 3000)
    for tokens in (2 * isl).tolist():
        shift.arrived(tokens)
        shift.move((), pressed=True)
    assert shift.moves
    least = max(r.min_prompt_tokens for r in placement.routes)
    assert {r.min_prompt_tokens for r in shift.routes(())} <= {0} | {
        int(r.min_prompt_tokens * shift.lengths.prompt / shift.planned.prompt) for r in placement.routes
    }
    assert max(r.min_prompt_tokens for r in shift.routes(())) in (0, *range(int(1.5 * least), 3 * least))


def test_the_search_asks_the_simulator_and_keeps_the_undivided_one_in_a_tie(monkeypatch):
    """With one extra trial; where that shows no gain, the answer is as if nobody had asked."""
    goal = placed().goal.model_copy(update={"objective": "goodput", "ttft_ms": 4000.0, "tpot_ms": 250.0})
    placement = placed().model_copy(update={"goal": goal})
    cluster = Cluster.from_spec(placement.cluster)
    effort = Effort(first=800, final=800, most=1200, longest=1600, final_runs=2, challengers=0)
    asked = []

    def promised(divided):
        monkeypatch.setattr(finalists, "split_by_length", lambda one: asked.append(one) or divided)
        return with_promise([placement], cluster, 1, lambda: False, effort)

    without = promised(None)
    assert promised(placement.model_copy()).model_dump() == without.model_dump()
    assert len(asked) == 2
