"""The flow after a loss: as large as a max flow, as even as the search's, and within all shared
capacities."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from placements import placement_of, replica_of
from problems import clusters, problem_from
from scipy.optimize import linprog

from cost_model.registry import make_cost_model
from hexgen2.checks import check_flow, check_gpus, check_links, check_names, traffic_of, verify
from hexgen2.cluster import Cluster
from hexgen2.network.shared_links import SharedLinks
from hexgen2.placement import Route
from hexgen2.prediction.latency import latency_of
from hexgen2.search.flow.max_flow import FlowNetwork, balance, solve
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from runtime.routing.reflow import Reflow
from runtime.routing.router import Router, routes_of

RATES = st.floats(0.05, 20.0)
TOLERANCE = 1e-6
LAYERS = 48  # of OPT-30B


def route_between(problem, source, target, capacity_req_s):
    """A route that carries one request/s."""
    return Route.between(source, target, problem.costs.kv_bytes_per_layer, capacity_req_s, flow_req_s=1.0)


@st.composite
def placements(draw, links=("pairwise", "shared"), max_gpus=9):
    """Replicas of one or two stages on random GPUs; some pairs are routes of one request/s."""
    problem = problem_from(draw(clusters(max_gpus)), "opt-30b", draw(st.sampled_from(["HPLD", "LPHD"])))
    gpus, replicas = draw(st.permutations(problem.cluster.gpu_ids)), []
    while gpus:
        stages = min(len(gpus), draw(st.integers(1, 2))) if len(replicas) > 1 else 1
        own, gpus = gpus[:stages], gpus[stages:]
        any_role = st.sampled_from(["prefill", "decode", "decode", "prefill", "colocated"])
        role = ("prefill", "decode")[len(replicas)] if len(replicas) < 2 else draw(any_role)
        layers = [20, LAYERS - 20] if stages == 2 else [LAYERS]
        replicas.append(
            replica_of(
                f"{role}-{len(replicas)}",
                list(zip(own, layers, strict=True)),
                capacity_req_s=draw(RATES),
                utilisation=draw(st.floats(0, 1)) * 0.01 if role == "colocated" else 0.0,
            )
        )
    pairs = [(p, d) for p in replicas for d in replicas if (p.role, d.role) == ("prefill", "decode")]
    shared = draw(st.sampled_from(links))
    routes = [route_between(problem, p, d, draw(RATES)) for p, d in pairs if draw(st.booleans())]
    return placement_of(problem.spec, problem.model, problem.workload, replicas, routes, shared)


@st.composite
def losses(draw, serves=False, **kinds):
    """A placement and at least one lost replica. If it `serves`, the first two survive; one lost name is
    unknown to it."""
    placement = draw(placements(**kinds))
    names = [replica.id for replica in placement.replicas]
    if not serves:
        return placement, draw(st.sets(st.sampled_from(names), min_size=1))
    return placement, {"nobody"} | draw(st.sets(st.sampled_from(["nobody", *names[2:]])))


def left_of(placement, lost, role):
    return [each for each in placement.replicas if each.role == role and each.id not in lost]


def carried(routes):
    """[(prefill, decode)] -> requests/s, without colocated replicas."""
    return {(r.prefill, r.decode): r.weight for r in routes if not r.colocated}


@settings(deadline=None, max_examples=60)
@given(losses())
def test_whatever_is_left_serves_and_nothing_that_is_lost(case):
    placement, lost = case
    routes = Reflow(placement).routes(lost)
    ends = {name for route in routes for name in (route.prefill, route.decode)}
    assert not ends & lost
    assert len({(r.prefill, r.decode) for r in routes}) == len(routes)
    prefill, decode = left_of(placement, lost, "prefill"), left_of(placement, lost, "decode")
    if prefill and decode:
        assert sum(carried(routes).values()) > 0
        assert {each.id for each in (*prefill, *decode)} <= ends
    for replica in left_of(placement, lost, "colocated"):
        (own,) = [route.weight for route in routes if route.prefill == replica.id]
        assert own == replica.capacity_req_s * replica.utilisation


@settings(deadline=None, max_examples=60)
@given(losses(serves=True, links=("pairwise",)))
def test_the_flow_is_a_maximum_flow_and_as_even_as_the_searchs(case):
    placement, lost = case
    prefill, decode = left_of(placement, lost, "prefill"), left_of(placement, lost, "decode")
    reflow = Reflow(placement)
    flows = carried(reflow.routes(lost))
    graph = nx.DiGraph()
    for replica in (*prefill, *decode):
        ends = ("source", replica.id) if replica.role == "prefill" else (replica.id, "sink")
        graph.add_edge(*ends, capacity=replica.capacity_req_s)
    for p in prefill:
        for d in decode:
            graph.add_edge(p.id, d.id, capacity=reflow.between(p.id, d.id).capacity_req_s)
    value = nx.maximum_flow_value(graph, "source", "sink")
    assert sum(flows.values()) == pytest.approx(value, rel=1e-5)
    for pair, flow in flows.items():
        assert flow <= graph.edges[pair]["capacity"] * (1 + TOLERANCE) + 1e-9
    sides = [[each.capacity_req_s for each in side] for side in (prefill, decode)]
    capacities = [[graph.edges[p.id, d.id]["capacity"] for d in decode] for p in prefill]
    network = FlowNetwork(np.array(sides[0]), np.array(sides[1]), np.array(capacities))
    even = balance(network, solve(network)).routes
    mine = np.array([[flows.get((p.id, d.id), 0.0) for d in decode] for p in prefill])
    assert slack(mine, *sides) <= slack(even, *sides) + 2e-3


def slack(flow, prefill, decode):
    """How far the busiest replica is above its role's mean, as a share of how far it could be."""
    found = 0.0
    for loads, capacity in ((flow.sum(axis=1), prefill), (flow.sum(axis=0), decode)):
        mean = flow.sum() / sum(capacity)
        busiest = max(load / own for load, own in zip(loads, capacity, strict=True))
        assert busiest <= 1 + 1e-5
        found = max(found, (busiest - mean) / (1 - mean) if mean < 1 - 1e-6 else 0.0)
    return found


@settings(deadline=None, max_examples=60)
@given(losses(serves=True, links=("shared",)))
def test_what_is_shared_is_respected_and_used_as_well_as_can_be(case):
    placement, lost = case
    prefill, decode = left_of(placement, lost, "prefill"), left_of(placement, lost, "decode")
    reflow = Reflow(placement)
    flows = carried(reflow.routes(lost))
    pairs = [(p, d) for p in prefill for d in decode]
    problem_costs = costs_of(placement)
    cluster = Cluster.from_spec(placement.cluster)
    still = left_of(placement, lost, "colocated")

    ports = [(side, gpu) for side in ("send", "receive") for gpu in range(len(cluster))]
    resources = [*range(SharedLinks(cluster).count), *ports]

    def use(rates):
        """The used share of everything that is shared, by the traffic that the checker counts."""
        busy = {}
        routes = []
        for (p, d), rate in zip(pairs, rates, strict=True):
            busy[p.id] = busy.get(p.id, 0.0) + rate
            busy[d.id] = busy.get(d.id, 0.0) + rate
            routes.append(reflow.between(p.id, d.id).model_copy(update={"flow_req_s": rate}))
        replicas = [
            each.model_copy(update={"utilisation": busy[each.id] / each.capacity_req_s})
            for each in (*prefill, *decode)
        ]
        shares = traffic_of(cluster, problem_costs, [*replicas, *still], routes).shares
        return np.array([shares.get(resource, 0.0) for resource in resources])

    none = use(np.zeros(len(pairs)))
    assert use([flows.get((p.id, d.id), 0.0) for p, d in pairs]).max() <= max(1.0, none.max()) * (1 + 1e-5)
    columns = np.stack([use(row) - none for row in np.eye(len(pairs))], axis=1)
    ends = [
        [float(pair[k] is each) for pair in pairs]
        for k, side in enumerate((prefill, decode))
        for each in side
    ]
    limits = [*(each.capacity_req_s for each in (*prefill, *decode)), *np.maximum(1 - none, 0)]
    bounds = [(0, reflow.between(p.id, d.id).capacity_req_s) for p, d in pairs]
    best = linprog(-np.ones(len(pairs)), np.vstack([ends, columns]), limits, bounds=bounds)
    assert sum(flows.values()) == pytest.approx(-best.fun, rel=1e-4, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(losses())
def test_the_placement_that_is_left_passes_the_checks_that_every_placement_passes(case):
    placement, lost = case
    cluster = Cluster.from_spec(placement.cluster)
    none = [route.model_copy(update={"flow_req_s": 0.0}) for route in placement.routes]
    assume(not list(check_links(placement.model_copy(update={"routes": none}), cluster)))
    left = Reflow(placement).placement(lost)
    assert {replica.id for replica in left.replicas} == {r.id for r in placement.replicas} - lost
    assert set(left.lost) == {gpu for r in placement.replicas if r.id in lost for gpu in r.gpus}
    wrong = [*check_gpus(left, cluster), *check_names(left), *check_flow(left), *check_links(left, cluster)]
    assert not wrong
    used = {gpu for replica in left.replicas for gpu in replica.gpus}
    idle = set(cluster.gpu_ids) - used - set(left.lost)
    assert left.latency == latency_of(left.replicas, cluster, costs_of(placement), "pipelined")
    said = " ".join(left.bottlenecks)
    assert all(gpu in said for gpu in idle) and not any(name in said.split() for name in lost)
    carried_s = sum(route.flow_req_s for route in left.routes)
    alone = sum(r.utilisation * r.capacity_req_s for r in left.replicas if r.role == "colocated")
    assert left.throughput.req_s == pytest.approx(carried_s + alone)


def costs_of(placement):
    return make_cost_model(placement.cost_model.name, placement.model, placement.workload.lengths)


@settings(deadline=None, max_examples=20)
@given(losses())
def test_without_a_loss_the_routes_are_the_placements_and_a_router_keeps_its_credit(case):
    placement, lost = case
    reflow = Reflow(placement)
    assert reflow.routes(()) == routes_of(placement)
    assume(placement.routes)
    router = Router(reflow.routes(()))
    for _ in range(7):
        router.pick()
    left = reflow.routes(lost)
    back = router.with_routes(left).with_routes(reflow.routes(()))
    assert back.routes == router.routes
    used = {(route.prefill, route.decode) for route in left if route.weight > 0}
    for one, other in zip(router._standing, back._standing, strict=True):
        kept = (one.route.prefill, one.route.decode) in used
        assert other.credit == (one.credit if kept else 0.0)


def test_what_limits_the_throughput_is_said_of_what_is_left():
    # Under this cost model, what is left is limited by something else.
    problem = make_problem("hexgen2-setting-1", "llama-2-70b", "LPLD", cost_model="calibrated")
    whole = find_strategy("hexgen2")(problem, SearchOptions())
    full = max(whole.routes, key=lambda route: route.flow_req_s / route.capacity_req_s)
    lost = whole.replica(full.to)
    left = [replica.id for replica in whole.replicas if replica.role == "decode" and replica is not lost]
    found = Reflow(whole).placement({lost.id})
    assert found.latency != whole.latency and found.bottlenecks != whole.bottlenecks
    assert not any(lost.id in text for text in found.bottlenecks)
    assert any(name in text for text in found.bottlenecks for name in (*left, "all decode"))
    assert found.bound.gap == pytest.approx(1 - found.throughput.req_s / whole.bound.req_s)
    verify(found)


def test_both_partners_of_a_pair_lost_leaves_the_other_two_serving():
    spec = {
        "name": "two",
        "nodes": [{"name": n, "accelerators": "A100-80GB:2", "interconnect": "pcie4"} for n in ("a", "b")],
        "network": {"default": {"bandwidth_gbit_s": 10, "latency_us": 50}},
    }
    problem = problem_from(spec, "opt-30b", "HPLD")
    gpus = {"prefill-0": "a/0", "decode-0": "a/1", "prefill-1": "b/0", "decode-1": "b/1"}
    replicas = [replica_of(name, [(gpu, LAYERS)]) for name, gpu in gpus.items()]
    routes = [route_between(problem, *pair, 9.0) for pair in (replicas[:2], replicas[2:])]
    placement = placement_of(problem.spec, problem.model, problem.workload, replicas, routes, "shared")
    (left,) = Reflow(placement).routes({"prefill-0", "decode-1"})
    assert (left.prefill, left.decode) == ("prefill-1", "decode-0")
    assert left.weight == pytest.approx(min(2.0, 10e9 / 8 / routes[0].kv_bytes_per_req), rel=1e-3)
