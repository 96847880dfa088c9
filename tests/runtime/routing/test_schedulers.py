"""Schedulers beside the flow: who gets which share, Algorithm 2 against a plain version, losses."""

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.errors import InputError
from hexgen2.prediction.batch_times import BatchTimes
from hexgen2.schedulers import SCHEDULERS
from hexgen2.workload.classes import load_workload
from runtime.routing.admission import Admission
from runtime.routing.fair_queue import FirstCome
from runtime.routing.instances import Instance
from runtime.routing.kv_budget import KvBudget
from runtime.routing.output_lengths import OutputLengths, make_predictor
from runtime.routing.router import Route, Router
from runtime.routing.schedulers import MAKE, WITH_INSTANCES, make_router
from runtime.routing.workload_router import WorkloadRouter

PREDICTOR = make_predictor(None, load_workload("online"))
NUMBERS = count()


class Known(OutputLengths):
    """Knows the output of every request."""

    def predict(self, request):
        return float(request.output_tokens)

    def learn(self, prompt_tokens, output_limit, output_tokens):
        raise AssertionError("nobody has ended")


@dataclass(eq=False)
class Asked:
    prompt_tokens: int
    output_tokens: int = 10
    request_id: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def capacity_tokens(self):
        return self.prompt_tokens + self.output_tokens

    @property
    def output_limit(self):
        return self.output_tokens

    @property
    def one_token(self):
        return self.output_tokens == 1


def replica(gpus=1, speed=1.0, kv_tokens=10_000, places=50):
    """A replica whose batches take 1/speed of the time."""
    times = BatchTimes(
        (1e-4 / speed, 1e-3 / speed, 1e-6 / speed, 1e-2 / speed),
        (1e-7 / speed, 1e-4 / speed, 1e-8 / speed, 1e-2 / speed),
        *(0.0, 0),
    )
    budget = KvBudget(kv_tokens, places)
    budget.know(Instance(gpus, times))
    return budget


def served(router, replicas, requests=60):
    """How many of so many requests each pair of replicas gets, none of which ends."""
    router, found = router.among(replicas), Counter()
    for _ in range(requests):
        route = router.choose(Asked(100), lambda _: True)
        found[route.prefill + route.decode] += 1
    return found


def test_names_are_those_of_the_command_line():
    assert list(MAKE) == list(SCHEDULERS)
    assert set(WITH_INSTANCES) < set(MAKE)
    with pytest.raises(InputError, match="did you mean 'round-robin'"):
        make_router("round_robin", [], PREDICTOR)
    assert type(make_router(None, [], PREDICTOR)) is Router


BIG, SMALL = Route("c0", "c0", 3.0), Route("c1", "c1", 1.0)


@pytest.mark.parametrize(
    ("scheduler", "shares"),
    [("flow", (45, 15)), ("round-robin", (30, 30)), ("weighted", (48, 12)), ("single", (60, 0))],
)
def test_shares_by_weight(scheduler, shares):
    replicas = {"c0": replica(gpus=4), "c1": replica()}
    found = served(make_router(scheduler, [BIG, SMALL], PREDICTOR), replicas)
    assert (found["c0c0"], found["c1c1"]) == shares


def test_weighted_divides_the_share_of_a_decode_replica_as_the_flow_does():
    routes = [Route("p0", "d0", 3.0), Route("p1", "d0", 1.0), Route("p1", "d1", 1.0)]
    replicas = {"p0": replica(), "p1": replica(), "d0": replica(gpus=4), "d1": replica(gpus=2)}
    found = served(make_router("weighted", routes, PREDICTOR), replicas)
    assert found == {"p0d0": 30, "p1d0": 10, "p1d1": 20}


def test_single_goes_on_with_the_next_when_the_strongest_is_lost():
    router = make_router("single", [BIG, SMALL], PREDICTOR).among({})
    assert router.with_routes([SMALL]).choose(Asked(5), lambda _: True) == SMALL
    assert router.choose(Asked(5), lambda route: route is SMALL) is None  # it waits for the strongest


def test_faster_replicas_get_more_and_work_is_even():
    replicas = {
        "c0": replica(speed=3.0, kv_tokens=10**6, places=10**4),
        "c1": replica(kv_tokens=10**6, places=10**4),
    }
    found = served(make_router("workload-aware", [BIG, SMALL], PREDICTOR), replicas, 80)
    assert found["c0c0"] == pytest.approx(3 * found["c1c1"], rel=0.25)
    works = [each.backlog.work for each in replicas.values()]
    assert works[0] == pytest.approx(works[1], rel=0.1)


def test_memory_ignores_speed_and_fills_what_has_room():
    replicas = {"c0": replica(kv_tokens=40_000, places=200), "c1": replica(speed=9.0)}
    found = served(make_router("memory", [BIG, SMALL], PREDICTOR), replicas, 1000)
    assert 2 * found["c1c1"] < found["c0c0"] < 5 * found["c1c1"]


SIZES = st.tuples(st.integers(500, 20_000), st.integers(1, 60), st.sampled_from([0.5, 1.0, 3.0, 8.0]))
LENGTHS = st.lists(st.tuples(st.integers(1, 400), st.integers(2, 300)), min_size=1, max_size=40)


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=4), LENGTHS, st.booleans(), st.integers(0, 10**6))
def test_algorithm_2_as_a_plain_loop(sizes, lengths, as_printed, seed):
    """Equations 5 to 8 and the mapper, written down once more, with requests that end in between."""
    replicas = {
        f"c{k}": replica(speed=speed, kv_tokens=kv, places=places)
        for k, (kv, places, speed) in enumerate(sizes)
    }
    routes = [Route(name, name, 1.0) for name in replicas]
    router = WorkloadRouter(routes, Known(), as_printed=as_printed).among(replicas)
    rng, running = random.Random(seed), {name: {} for name in replicas}
    for prompt, output in lengths:
        request, values = Asked(prompt, output), {}
        for name, budget in replicas.items():
            own, times = running[name], budget.instance.times
            size = max(1, min(budget.max_batch, budget.kv_budget_tokens // (prompt + output)))
            p, d = times.prefill, times.decode
            seconds = p[0] * size * prompt + p[1] * size + p[2] * prompt + p[3]
            for k in range(1, output):
                seconds += d[0] * size * (prompt + k) + d[1] * size + d[2] * (prompt + k) + d[3]
            used = sum(tokens for _, tokens in own.values()) / budget.kv_budget_tokens
            if not as_printed:
                used = min(1, max(used, len(own) / budget.max_batch))
            values[name] = seconds / size * math.exp(min(200, 2 * used))
        sums = {n: math.fsum(w for w, _ in running[n].values()) + values[n] for n in replicas}
        route = router.choose(request, lambda _: True)
        assert sums[route.prefill] <= min(sums.values()) * (1 + 1e-5)
        running[route.prefill][request.request_id] = values[route.prefill], prompt + output
        replicas[route.prefill].hold(request.request_id, prompt)
        for name, own in running.items():
            for ended in [each for each in own if rng.random() < 0.1]:
                del own[ended]
                replicas[name].release(ended)
    for name, budget in replicas.items():
        assert len(budget.backlog) == len(running[name])


def test_a_request_counts_where_each_phase_runs():
    routes = [Route("p", "d", 1.0), Route("p", "e", 1.0), Route("m", "m", 1.0), Route("m", "d", 0.0)]
    replicas = {name: replica() for name in "pdem"}
    router = WorkloadRouter(routes, Known()).among(replicas)
    first = router.choose(Asked(300, 20), lambda route: route.prefill == "p")
    assert {name for name, each in replicas.items() if len(each.backlog)} == {"p", first.decode}
    assert replicas["p"].backlog.tokens == 300 and replicas[first.decode].backlog.tokens == 320
    second = router.choose(Asked(300, 20), lambda route: route.prefill == "p")
    assert {first.decode, second.decode} == {"d", "e"}
    router.choose(Asked(50, 1), lambda route: route == routes[0])
    assert len(replicas["p"].backlog) == 3 and len(replicas["d"].backlog) == 1
    assert router.choose(Asked(10, 10), lambda route: route.weight == 0 or route.prefill == "m") == routes[2]
    assert router.choose(Asked(10, 10), lambda route: route.weight == 0) == routes[3]


def test_prompts_that_are_too_short_for_a_route_take_it_only_when_nothing_else_has_room():
    long = Route("p", "d", 1.0, min_prompt_tokens=500)
    replicas = {"p": replica(), "d": replica(), "c0": replica(speed=0.01)}
    router = WorkloadRouter([BIG, long], Known()).among(replicas)
    assert {router.choose(Asked(100), lambda _: True) for _ in range(20)} == {BIG}
    assert router.choose(Asked(600), lambda _: True) == long
    assert router.choose(Asked(100), lambda route: route is long) == long


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_admission_with_losses(scheduler):
    """Every scheduler: requests queue for room, a lost replica gets none, and its backlog is gone."""
    replicas = {"c0": replica(kv_tokens=1000), "c1": replica(kv_tokens=1000)}
    routes = [Route("c0", "c0", 1.0), Route("c1", "c1", 2.0)]
    admission = Admission(make_router(scheduler, routes, PREDICTOR), replicas, FirstCome(1000))
    for _ in range(40):
        admission.enqueue(Asked(90))
    started = []

    def start():
        while (found := admission.next()) is not None:
            request, route = found
            replicas[route.prefill].hold(request.request_id, request.prompt_tokens)
            started.append((request, route))

    start()
    assert len(admission) > 0 and all(each.held_tokens <= 1000 for each in replicas.values())
    lost = "c1"
    assert admission.lose(lost, "gone", returns=True) == []
    for request, route in started:
        if route.prefill == lost:
            replicas[lost].release(request.request_id)
            admission.put_back(request)
    assert len(replicas[lost].backlog) == 0 and replicas[lost].backlog.work == 0
    ended = [each for each in started if each[1].prefill != lost]
    started.clear()
    while len(admission):
        for request, _ in ended:
            replicas["c0"].release(request.request_id)
        start()
        assert started and {route.prefill for _, route in started} == {"c0"}
        ended, started = started, []
        started.clear()
    admission.restore(lost)
    for _ in range(60):
        admission.enqueue(Asked(1))
    start()
    assert lost in {route.prefill for _, route in started}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_nothing_admissible_changes_nothing(scheduler):
    both = [{"c0": replica(), "c1": replica()} for _ in range(2)]
    one, other = (make_router(scheduler, [BIG, SMALL], PREDICTOR).among(each) for each in both)
    for _ in range(3):
        assert one.choose(Asked(10), lambda _: False) is None
    assert all(len(each.backlog) == 0 for each in both[0].values())
    assert one.choose(Asked(10), lambda _: True) == other.choose(Asked(10), lambda _: True)
    assert make_router(scheduler, [], PREDICTOR).among(both[0]).choose(Asked(1), lambda _: True) is None
