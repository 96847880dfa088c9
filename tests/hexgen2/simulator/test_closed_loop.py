"""Limits of requests in flight: when each request is sent, and that a limit not reached changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexgen2
from cluster_specs.loader import resolve
from cost_model.errors import InputError
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.search.problem import make_problem
from hexgen2.simulator.batching import POLICIES
from hexgen2.simulator.options import Failure, Options, Replan
from hexgen2.simulator.records import Records
from hexgen2.simulator.run import simulate
from hexgen2.simulator.simulation import Simulation
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.arrivals import LengthSource, offline, online
from hexgen2.workload.requests import Requests


def place(strategy: str, isl: float = 400, osl: float = 60) -> Placement:
    problem = make_problem("hexgen2-case-study", "llama-2-13b", None, isl=isl, osl=osl)
    return find_strategy(strategy)(problem, SearchOptions())


PLACED = {strategy: place(strategy) for strategy in ("hexgen2", "vllm")}
LENGTHS = LengthSource.load(None, 400, 60, 0.3)


def run(placement: Placement, requests: Requests, **options) -> tuple[Records, np.ndarray]:
    """Records, and when requests ended, successfully or not, in order."""
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    records = Records(requests)
    simulation = Simulation(placement, cluster, records, Options(**options))
    failed_s, fail = [], records.fail
    records.fail = lambda request, why: (failed_s.append(simulation.now), fail(request, why))
    simulation.run()
    ended_s = records.end_s[~np.isnan(records.end_s)]
    assert len(ended_s) + len(failed_s) == len(requests)
    return records, np.sort(np.concatenate([ended_s, failed_s]))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([("hexgen2", "mixed"), *(("vllm", policy) for policy in POLICIES)]),
    st.integers(1, 40),
    st.integers(1, 90),
    st.sampled_from([None, 3.0, 30.0]),
    st.sampled_from([{}, {"queue_limit": 2}, {"front_end_s": 0.01}, {"fail": True}, {"fail": False}]),
    st.integers(0, 9),
)
def test_a_request_is_sent_when_it_arrives_and_another_has_made_way(who, clients, count, rate, more, seed):
    """That is, the k-th at the time of the (k - N)-th end: never more than N are in flight, and never fewer
    while requests have arrived that are not sent."""
    strategy, policy = who
    placement = PLACED[strategy]
    options = {"policy": policy, "max_concurrency": clients, **more}
    if "fail" in more:
        at_s, lost = (2.0, placement.replicas[-1].id)
        options |= {"failures": [Failure(at_s, lost)], "recover": options.pop("fail")}
    requests = online(LENGTHS, rate, count, seed) if rate else offline(LENGTHS, count, seed)
    records, ended_s = run(placement, requests, **options)
    makes_way_s = np.concatenate([np.zeros(clients), ended_s])[:count]
    assert records.sent_s.tolist() == np.maximum(requests.arrival_s, makes_way_s).tolist()
    assert (np.nan_to_num(records.first_s, nan=np.inf) >= records.sent_s).all()


@pytest.mark.parametrize("strategy", PLACED)
@pytest.mark.parametrize("rate", [None, 5.0])
def test_a_limit_that_is_not_reached_changes_nothing(strategy, rate):
    requests = online(LENGTHS, rate, 120, 1) if rate else offline(LENGTHS, 120, 1)
    free, limited = (simulate(PLACED[strategy], requests, Options(max_concurrency=n)) for n in (None, 120))
    assert free == limited


def test_a_lone_client_sees_no_queue():
    placement = PLACED["vllm"]
    requests = offline(LengthSource.load(None, 400, 60), 30, 0)
    found = simulate(placement, requests, Options("chunked", max_concurrency=1))
    # Router and replicas take turns, so each request has a replica for itself.
    records, _ = run(placement, requests, policy="chunked", max_concurrency=1)
    for replica in set(records.prefill):
        own = np.array([name == replica for name in records.prefill])
        ttft_s = (records.first_s - records.sent_s)[own]
        assert ttft_s == pytest.approx(ttft_s[0])
    assert found.duration_s == pytest.approx(found.mean_e2el_ms * 30 / 1e3)
    assert found.request_throughput == pytest.approx(1e3 / found.mean_e2el_ms)


def test_little_s_law_holds_between_the_first_wave_and_the_last():
    """Requests in flight = throughput x time in the system."""
    requests = offline(LENGTHS, 800, 2)
    found = simulate(PLACED["vllm"], requests, Options("chunked", max_concurrency=32))
    assert found.steady_request_throughput * found.mean_e2el_ms / 1e3 == pytest.approx(32, rel=0.03)
    assert sum(row["requests"] for row in found.replicas.values()) == 800


def test_clients_are_freed_by_refusals_and_when_all_replicas_are_lost():
    placement = PLACED["vllm"]
    lost = [Failure(3.0, replica.id) for replica in placement.replicas]
    found = simulate(placement, offline(LENGTHS, 400, 0), Options(max_concurrency=5, failures=lost))
    assert found.completed and found.completed + found.failed == 400
    too_long = Requests(np.zeros(3), np.array([10**6, 50, 10**6]), np.array([5, 5, 5]), "by hand")
    found = simulate(placement, too_long, Options(max_concurrency=1))
    assert (found.completed, found.failed) == (1, 2)


def test_a_closed_loop_goes_through_a_change_of_placement():
    placement = PLACED["hexgen2"]
    following = hexgen2.replan(placement, lost="h100-1/3", seed=0)
    options = {"max_concurrency": 24, "replans": [Replan(4.0, following)]}
    records, ended_s = run(placement, offline(LENGTHS, 400, 0), **options)
    assert not records.failed
    assert records.sent_s.tolist() == [0.0] * 24 + ended_s[:-24].tolist()


def test_the_batch_and_the_step_have_the_limits_that_are_asked_for():
    placement = place("vllm", 300, 200)
    requests = offline(LengthSource.load(None, 300, 200), 300, 0)
    for most in (3, 17):
        found = simulate(placement, requests, Options("chunked", max_batch=most))
        assert {row["peak_running"] for row in found.replicas.values()} == {most}
    # A lone prompt of 300 tokens takes three steps of 128.
    alone = offline(LengthSource.load(None, 300, 200), 1, 0)
    short, long = (simulate(placement, alone, Options("chunked", step_tokens=n)) for n in (128, 8192))
    assert short.mean_ttft_ms > 1.5 * long.mean_ttft_ms and short.mean_tpot_ms == long.mean_tpot_ms
    split, whole = (simulate(PLACED["hexgen2"], alone, Options(step_tokens=n)) for n in (128, 8192))
    assert split.mean_ttft_ms > whole.mean_ttft_ms


def test_python_says_what_is_in_flight_and_refuses_nonsense():
    found = hexgen2.simulate(
        PLACED["vllm"], isl=100, osl=20, length_range=0.8, max_concurrency=4, num_requests=40
    )
    assert found.requests.endswith("all 40 at once, at most 4 in flight")
    assert 40 * 80 <= found.total_input_tokens <= 40 * 100 and 40 * 16 <= found.total_output_tokens <= 800
    for key in ("max_concurrency", "max_batch", "step_tokens"):
        with pytest.raises(InputError, match=f"--{key.replace('_', '-')}: is 0"):
            hexgen2.simulate(PLACED["vllm"], offline=True, **{key: 0})
    with pytest.raises(InputError, match="--duration-s: needs times of arrival"):
        hexgen2.simulate(PLACED["vllm"], max_concurrency=4, duration_s=3)
