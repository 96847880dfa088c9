"""The flow after a loss: as large as a max flow, as even as the search's, and within all shared capacities
and the regions of mixed replicas."""

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
from hexgen2.region import Region
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


PURE = ("prefill", "decode", "decode", "prefill", "colocated")
MIXED = ("prefill", "decode", "mixed", "mixed", "colocated")


@st.composite
def regions(draw):
    """The corners of a region: from (0, D) to (P, 0), convex; its first and last sides may be level and
    upright."""
    most_p, most_d = draw(RATES), draw(RATES)
    share = st.floats(0.05, 0.95) | st.just(1.0)
    inside = draw(st.lists(st.tuples(share, share), max_size=3))
    points = [(x * most_p, y * most_d) for x, y in inside if x + y > 1.01]
    return Region.around([(0.0, most_d), *points, (most_p, 0.0)]).corners


def alone(corners):
    """Requests/s that a mixed replica with this region serves alone."""
    return 1 / Region(tuple(corners)).busy(1.0, 1.0)


@st.composite
def placements(draw, links=("pairwise", "shared"), max_gpus=9, roles=PURE + MIXED, first=None):
    """Replicas of one or two stages on random GPUs; some pairs are routes of one request/s. The first two are
    a prefill and a decode replica, unless `first` gives other roles."""
    first = first or draw(st.sampled_from([("prefill", "decode"), ("mixed", "mixed")]))
    first = first if set(first) <= set(roles) else ("prefill", "decode")
    problem = problem_from(draw(clusters(max_gpus)), "opt-30b", draw(st.sampled_from(["HPLD", "LPHD"])))
    gpus, replicas = draw(st.permutations(problem.cluster.gpu_ids)), []
    while gpus:
        stages = min(len(gpus), draw(st.integers(1, 2))) if len(replicas) > 1 else 1
        own, gpus = gpus[:stages], gpus[stages:]
        role = first[len(replicas)] if len(replicas) < 2 else draw(st.sampled_from(roles))
        corners = draw(regions()) if role == "mixed" else None
        layers = [20, LAYERS - 20] if stages == 2 else [LAYERS]
        replicas.append(
            replica_of(
                f"{role}-{len(replicas)}",
                list(zip(own, layers, strict=True)),
                capacity_req_s=alone(corners) if corners else draw(RATES),
                utilisation=draw(st.floats(0, 1)) * 0.01 if role == "colocated" else 0.0,
                region=corners,
            )
        )
    pairs = [(p, d) for p in senders(replicas) for d in receivers(replicas) if p is not d]
    shared = draw(st.sampled_from(links))
    routes = [route_between(problem, p, d, draw(RATES)) for p, d in pairs if draw(st.booleans())]
    own = [each for each in replicas if each.role == "mixed" and draw(st.booleans())]
    routes += [local(each) for each in own]
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


def local(replica):
    """The route of a mixed replica to itself."""
    ends = {"from": replica.id, "to": replica.id, "kv_bytes_per_req": 0.0}
    return Route(**ends, flow_req_s=0.01, capacity_req_s=replica.capacity_req_s)


def senders(replicas):
    return [each for each in replicas if each.role in ("prefill", "mixed")]


def receivers(replicas):
    return [each for each in replicas if each.role in ("decode", "mixed")]


def left_of(placement, lost, *roles):
    return [each for each in placement.replicas if each.role in roles and each.id not in lost]


def carried(routes):
    """[(prefill, decode)] -> requests/s, without colocated replicas."""
    return {(r.prefill, r.decode): r.weight for r in routes if not r.prefill.startswith("colocated")}


@settings(deadline=None, max_examples=60)
@given(losses())
def test_whatever_is_left_serves_and_nothing_that_is_lost(case):
    placement, lost = case
    routes = Reflow(placement).routes(lost)
    ends = {name for route in routes for name in (route.prefill, route.decode)}
    assert not ends & lost
    assert len({(r.prefill, r.decode) for r in routes}) == len(routes)
    prefill, decode = left_of(placement, lost, "prefill"), left_of(placement, lost, "decode")
    mixed = left_of(placement, lost, "mixed")
    if mixed or (prefill and decode):
        assert sum(carried(routes).values()) > 0
        assert {each.id for each in (*prefill, *decode, *mixed)} <= ends
        assert {(each.id, each.id) for each in mixed} <= carried(routes).keys()
    for replica in left_of(placement, lost, "colocated"):
        (own,) = [route.weight for route in routes if route.prefill == replica.id]
        assert own == replica.capacity_req_s * replica.utilisation


@settings(deadline=None, max_examples=60)
@given(losses(serves=True, links=("pairwise",), roles=PURE))
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
@given(losses(serves=True, links=("shared",), roles=PURE))
def test_what_is_shared_is_respected_and_used_as_well_as_can_be(case):
    placement, lost = case
    prefill, decode = left_of(placement, lost, "prefill"), left_of(placement, lost, "decode")
    reflow = Reflow(placement)
    flows = carried(reflow.routes(lost))
    pairs = [(p, d) for p in prefill for d in decode]
    none, columns = use_of(placement, lost, reflow, pairs)
    assert (none + columns @ rates_of(flows, pairs)).max() <= max(1.0, none.max()) * (1 + 1e-5)
    ends = [
        [float(pair[k] is each) for pair in pairs]
        for k, side in enumerate((prefill, decode))
        for each in side
    ]
    limits = [*(each.capacity_req_s for each in (*prefill, *decode)), *np.maximum(1 - none, 0)]
    bounds = [(0, reflow.between(p.id, d.id).capacity_req_s) for p, d in pairs]
    best = linprog(-np.ones(len(pairs)), np.vstack([ends, columns]), limits, bounds=bounds)
    assert sum(flows.values()) == pytest.approx(-best.fun, rel=1e-4, abs=1e-9)


def rates_of(flows, pairs):
    return np.array([flows.get((p.id, d.id), 0.0) for p, d in pairs])


def use_of(placement, lost, reflow, pairs):
    """The used share of everything that is shared, by the traffic that the checker counts: without any route
    [resources], and for each request/s of the pairs [resources, pairs]."""
    problem_costs = costs_of(placement)
    cluster = Cluster.from_spec(placement.cluster)
    ports = [(side, gpu) for side in ("send", "receive") for gpu in range(len(cluster))]
    resources = [*range(SharedLinks(cluster).count), *ports]

    def use(rates):
        """The used share of everything that is shared, by the traffic that the checker counts."""
        routes = [
            reflow.between(p.id, d.id).model_copy(update={"flow_req_s": rate})
            for (p, d), rate in zip(pairs, rates, strict=True)
        ]
        left = [each for each in placement.replicas if each.id not in lost]
        shares = traffic_of(cluster, problem_costs, left, routes).shares
        return np.array([shares.get(resource, 0.0) for resource in resources])

    none = use(np.zeros(len(pairs)))
    return none, np.stack([use(row) - none for row in np.eye(len(pairs))], axis=1)


@settings(deadline=None, max_examples=80)
@given(losses(serves=True, roles=MIXED))
def test_mixed_replicas_do_all_that_their_regions_allow_and_no_more(case):
    """By a program of its own: what a mixed replica does is a division of its time between the corners of its
    region (and idling), where the flow knows the region by its edges."""
    placement, lost = case
    some = [each for each in placement.replicas if each.id not in lost]
    reflow = Reflow(placement)
    flows = carried(reflow.routes(lost))
    pairs = [(p, d) for p in senders(some) for d in receivers(some) if p is not d or p.role == "mixed"]
    assert flows.keys() <= {(p.id, d.id) for p, d in pairs}
    busiest = 0.0
    for each in some:
        prompts = sum(flow for (p, _), flow in flows.items() if p == each.id)
        answers = sum(flow for (_, d), flow in flows.items() if d == each.id)
        if each.role == "mixed":
            busiest = max(busiest, each.busy(prompts, answers))
        elif each.role != "colocated":
            busiest = max(busiest, (prompts + answers) / each.capacity_req_s)
    assert busiest <= 1 + 1e-5
    most, _ = program(placement, lost, reflow, pairs)
    assert sum(flows.values()) == pytest.approx(most, rel=1e-4, abs=1e-9)
    _, least = program(placement, lost, reflow, pairs, sum(flows.values()) * (1 - 1e-4))
    assert busiest <= least + 5e-3


def program(placement, lost, reflow, pairs, carry=None):
    """(the largest flow, None), or for a flow of at least `carry`: (that, the least use of the busiest
    replica)."""
    some = [each for each in placement.replicas if each.id not in lost]
    mixed = [each for each in some if each.role == "mixed"]
    corners = [(each, corner) for each in mixed for corner in each.region]
    count, rows, limits = len(pairs) + len(corners) + 1, [], []

    def row(of_pairs, of_corners=None, of_peak=0.0, limit=0.0):
        own = [of_corners(each, corner) if of_corners else 0.0 for each, corner in corners]
        rows.append([*(float(of_pairs(p, d)) for p, d in pairs), *own, of_peak])
        limits.append(limit)

    for each in some:
        if each.role == "mixed":
            for k in (0, 1):
                row(
                    lambda *pair, k=k, each=each: pair[k] is each,
                    lambda other, corner, k=k, each=each: -corner[k] * (other is each),
                )
            row(lambda p, d: 0, lambda other, _, each=each: float(other is each), of_peak=-1.0)
        elif each.role != "colocated":
            row(lambda *pair, each=each: each in pair, of_peak=-each.capacity_req_s)
    if placement.cost_model.links == "shared":
        none, columns = use_of(placement, lost, reflow, pairs)
        for used, column in zip(none, columns, strict=True):
            rows.append([*column, *[0.0] * (len(corners) + 1)])
            limits.append(max(0.0, 1 - used))
    bounds = [(0, reflow.between(p.id, d.id).capacity_req_s) for p, d in pairs]
    bounds += [(0, None)] * len(corners) + [(0, 1)]
    total = np.array([1.0] * len(pairs) + [0.0] * (count - len(pairs)))
    if carry is None:
        return -linprog(-total, np.array(rows), limits, bounds=bounds).fun, None
    peak = np.eye(count)[-1]
    found = linprog(peak, np.vstack([rows, -total]), [*limits, -carry], bounds=bounds)
    return carry, found.fun


def test_a_mixed_replica_takes_over_what_the_lost_one_did():
    """Its partner that decoded for it is lost: it serves alone, as fast as its region allows; and again with
    a prefill replica, for which it decodes, too."""
    spec = {
        "name": "three",
        "nodes": [{"name": "a", "accelerators": "A100-80GB:3", "interconnect": "nvlink"}],
        "network": {"default": {"bandwidth_gbit_s": 100, "latency_us": 50}},
    }
    problem = problem_from(spec, "opt-30b", "HPLD")
    mixed = replica_of("mixed-0", [("a/0", LAYERS)], capacity_req_s=2.0, region=[(0, 6), (3, 0)])
    prefill = replica_of("prefill-0", [("a/1", LAYERS)], capacity_req_s=4.0)
    decode = replica_of("decode-0", [("a/2", LAYERS)], capacity_req_s=9.0)
    routes = [route_between(problem, one, decode, 9.0) for one in (mixed, prefill)]
    placement = placement_of(
        problem.spec, problem.model, problem.workload, [mixed, prefill, decode], routes, "pairwise"
    )
    reflow = Reflow(placement)
    flows = carried(reflow.routes({"decode-0"}))
    assert flows["prefill-0", "mixed-0"] == pytest.approx(4.0, rel=1e-6)
    assert flows["mixed-0", "mixed-0"] == pytest.approx(2 / 3, rel=1e-6)  # p/3 + (p + 4)/6 = 1
    flows = carried(reflow.routes({"decode-0", "prefill-0"}))
    assert flows == {("mixed-0", "mixed-0"): pytest.approx(2.0, rel=1e-6)}
    left = reflow.placement({"decode-0", "prefill-0"})
    assert left.replicas[0].utilisation == pytest.approx(1.0, rel=1e-6)
    assert [(r.from_, r.to, r.kv_bytes_per_req, r.links) for r in left.routes] == [
        ("mixed-0", "mixed-0", 0.0, [])
    ]


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
