"""Placements of layer ranges in simulation: times against sums by hand, limits, failures, schedulers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import hexgen2 as command
from hypothesis import given, settings
from hypothesis import strategies as st

import hexgen2
from cluster_specs.loader import resolve
from cost_model.base import Work
from cost_model.lengths import attended_tokens
from hexgen2.cluster import Cluster
from hexgen2.layer_ranges import range_of
from hexgen2.prediction.range_times import lone_s, range_tok_s, scale_to
from hexgen2.schedulers import PATH_SCHEDULERS

CASE = f"{Path(__file__).parents[2] / 'support' / 'helix_case.json'}#small"


@pytest.fixture(scope="module")
def placed() -> hexgen2.Placement:
    return hexgen2.search(case=CASE, strategy="helix", isl=100, osl=20)


def test_one_request_takes_the_sum_of_its_steps_and_hops(placed):
    """One prompt of 90 tokens and 3 tokens of answer over its path, by hand."""
    found = hexgen2.simulate(placed, isl=90, osl=3, max_concurrency=1, num_requests=1)
    (path,) = {tuple(name for name, each in found.replicas.items() if each["requests"])}
    cluster = Cluster.from_spec(resolve(placed.cluster, "cluster", Path()))
    costs, tokens = placed.costs(), placed.workload.isl + placed.workload.osl
    replicas = sorted((placed.replica(name) for name in path), key=lambda r: range_of(r)[1])
    done, at, first_s, token_s = 0, None, 0.0, [0.0, 0.0]
    for replica in replicas:
        device = cluster.index(replica.stages[0].gpus[0])
        group = replica.stages[0].tensor_group(
            cluster.types[int(cluster.type_of[device])], cluster.link(device, device)
        )
        (first, end), last = range_of(replica), range_of(replica)[1] == placed.model.layers
        given = replica.capacity_req_s * tokens
        scale = scale_to(given, costs, group, end - first, last, replica.max_batch)
        least_s = lone_s(costs, group, end - done, last)
        prompt = Work(90, attended_tokens(90), 0, 0, 1)
        works = prompt, Work(0, 0, 1, 91, 1), Work(0, 0, 1, 92, 1)
        steps = [
            scale((end - done) * costs.layer_work_s(group, w) + costs.edge_work_s(group, 1, last), least_s)
            for w in works
        ]
        hop = (
            (lambda n: 0.0)
            if at is None
            else (
                lambda n, a=at, b=device: (
                    float(cluster.latency_s[a, b])
                    + n * costs.activation_bytes_per_token / float(cluster.bandwidth_bytes_s[a, b])
                )
            )
        )
        first_s += steps[0] + hop(90)
        token_s = [own + step + hop(1) for own, step in zip(token_s, steps[1:], strict=True)]
        done, at = end, device
    assert done == placed.model.layers
    start = cluster.index(replicas[0].stages[0].gpus[0])
    back_s = float(cluster.latency_s[at, start])
    assert found.mean_ttft_ms == pytest.approx(first_s * 1e3, rel=1e-9)
    assert found.mean_tpot_ms == pytest.approx((sum(token_s) / 2 + back_s) * 1e3, rel=1e-9)


@pytest.mark.parametrize("scheduler", PATH_SCHEDULERS)
@pytest.mark.parametrize("policy", ["mixed", "chunked"])
def test_all_requests_are_served_whatever_chooses_their_paths(placed, scheduler, policy, tmp_path):
    rows = tmp_path / "requests.csv"
    asked = {"num_requests": 150, "offline": True, "scheduler": scheduler, "policy": policy}
    found = hexgen2.simulate(placed, requests_out=rows, **asked)
    assert (found.completed, found.failed) == (150, 0)
    ranges = {replica.id: range_of(replica) for replica in placed.replicas}
    used: dict[str, int] = {}
    for line in rows.read_text().splitlines()[1:]:
        path, done = line.split(",")[4].split(">"), 0
        for name in path:
            assert ranges[name][0] <= done < ranges[name][1]
            used[name], done = used.get(name, 0) + 1, ranges[name][1]
        assert done == placed.model.layers
    assert {name: each["requests"] for name, each in found.replicas.items() if each["requests"]} == used
    again = hexgen2.simulate(placed, **asked)
    assert again.to_dict() == found.to_dict()


def test_paths_have_their_shares_of_the_flow(placed):
    found = hexgen2.simulate(placed, num_requests=400, request_rate=placed.throughput.req_s / 4)
    total = sum(r.utilisation * r.capacity_req_s for r in placed.replicas if range_of(r)[0] == 0)
    for replica in placed.replicas:
        share = replica.utilisation * replica.capacity_req_s / total
        assert found.replicas[replica.id]["requests"] == pytest.approx(400 * share, abs=2)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(PATH_SCHEDULERS)))
def test_lost_replicas_requests_continue_or_fail(placed, seed, scheduler):
    rng = np.random.default_rng(seed)
    lost = [replica.id for replica in placed.replicas if rng.random() < 0.35]
    asked = {"num_requests": 60, "request_rate": 3.0, "seed": seed, "scheduler": scheduler}
    found = hexgen2.simulate(placed, failures=[(name, float(rng.uniform(0, 30))) for name in lost], **asked)
    assert found.completed + found.failed == 60
    left = [replica for replica in placed.replicas if replica.id not in lost]
    held = {layer for replica in left for layer in range(*range_of(replica))}
    if held != set(range(placed.model.layers)):
        assert found.failed > 0
    if not lost:
        assert found.failed == 0


def test_a_full_kv_cache_delays_requests_and_loses_none(placed):
    """Answers are far longer than expected: requests wait, some are preempted, all end."""
    scarce = placed.model_copy(
        update={"replicas": [r.model_copy(update={"max_batch": 3}) for r in placed.replicas]}
    )
    found = hexgen2.simulate(scarce, isl=100, osl=120, offline=True, num_requests=60)
    assert (found.completed, found.failed) == (60, 0)
    assert sum(replica["preemptions"] for replica in found.replicas.values()) > 0
    roomy = hexgen2.simulate(placed, isl=100, osl=120, offline=True, num_requests=60)
    assert roomy.mean_ttft_ms < found.mean_ttft_ms


def test_what_cannot_be_asked_is_told_in_one_line(placed, tmp_path):
    path = tmp_path / "p.json"
    placed.save(path)
    for wrong in (
        ("--scheduler", "fastest"),
        ("--policy", "inflight"),
        ("--fail", "n77@3"),
        ("--replan", f"{path}@3"),
    ):
        ran = command("simulate", path, "--num-requests", "5", *wrong)
        assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
    ran = command(
        "simulate", path, "--num-requests", "20", "--request-rate", "1", "--scheduler", "swarm", "--json"
    )
    assert ran.returncode == 0, ran.stderr


def test_requests_too_long_for_every_path_fail(placed):
    found = hexgen2.simulate(placed, isl=200_000, osl=5, num_requests=3, offline=True)
    assert found.completed == 0 and list(found.failures) == ["it is longer than any path can hold"]


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 1e6), st.integers(1, 6), st.booleans(), st.integers(1, 500))
def test_corrected_steps_pass_the_given_tokens(placed, tok_s, count, last, requests):
    """The rate anew from corrected steps; what a step takes at least only changes if it must."""
    cluster = Cluster.from_spec(resolve(placed.cluster, "cluster", Path()))
    costs, group = placed.costs(), placed.replicas[0].stages[0].tensor_group(cluster.types[0])
    scale = scale_to(tok_s, costs, group, count, last, requests)
    least_s = lone_s(costs, group, count, last)
    stages, prompts = -(-costs.model.layers // count), costs.prefill_batch()
    batch = max(1.0, requests / stages)
    step_s = count * costs.layer_s("decode", group, batch) + costs.edge_s("decode", group, batch, last)
    prompt_s = count * costs.layer_s("prefill", group, prompts) + costs.edge_s(
        "prefill", group, prompts, last
    )
    assert min(step_s, prompt_s) >= least_s
    seconds = scale(prompt_s, least_s) / prompts + costs.osl * scale(step_s, least_s) / (requests / stages)
    assert (costs.isl + costs.osl) / seconds == pytest.approx(tok_s)
    assert scale.least == 1 or scale.least == scale.more
    same = scale_to(range_tok_s(costs, group, count, last, requests), costs, group, count, last, requests)
    assert same == pytest.approx((1, 1))


def test_compare_sets_ranges_beside_whole_replicas():
    found = hexgen2.compare(
        cluster="hexgen2-case-study", model="llama-2-13b", workload="LPLD", strategies="vllm,swarm", seconds=1
    )
    peaks = {entry.contender.strategy: entry.peak_req_s for entry in found.entries}
    assert set(peaks) == {"vllm", "swarm"} and min(peaks.values()) > 0
