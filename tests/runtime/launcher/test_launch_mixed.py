"""Launch a placement of mixed replicas: its requests take every route, and survive the loss of one."""

import json
import math

import httpx
import pytest
from served import MIXED_FLOWS, SECONDS, Server, gauge, make_mixed_placement, until_idle

from cost_model.pipeline import outgoing_prompts
from hexgen2.checks import violations
from hexgen2.placement import Placement
from runtime.launcher.configure import configurations, emulated_links
from runtime.options import EngineOptions
from runtime.routing.kv_budget import kv_budgets, outgoing_tokens
from runtime.routing.router import Route, routes_of


@pytest.fixture
def placement(model_folder):
    return make_mixed_placement(model_folder)


def stream(http, body, count, strike):
    """The texts of `count` choices; `strike` is called once all of them have begun."""
    texts, struck = dict.fromkeys(range(count), ""), False
    with http.stream("POST", "/v1/completions", json=body | {"n": count, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
                if not struck and all(texts.values()):
                    strike()
                    struck = True
    assert struck
    return list(texts.values())


def test_a_mixed_replica_killed_in_mid_stream_loses_nothing(placement, model_folder, tmp_path, reference):
    assert violations(placement) == []
    server = Server(model_folder, tmp_path, placement=placement)
    text = "the quick brown"
    body = {"model": placement.model.name, "prompt": text, "temperature": 0, "ignore_eos": True}
    short, long = body | {"max_tokens": 12}, body | {"max_tokens": 200}
    try:
        server.until_serving()
        assert "(1 prefill, 1 decode, 2 mixed replicas)" in server.log.read_text()
        with httpx.Client(base_url=server.url, timeout=SECONDS) as http:
            answers = [http.post("/v1/completions", json=short) for _ in range(16)]
            assert {answer.json()["choices"][0]["text"] for answer in answers} == {reference.text(text, 12)}
            taken = [
                tuple(answer.headers[f"x-hexgen2-{phase}-replica"] for phase in ("prefill", "decode"))
                for answer in answers
            ]
            total = sum(MIXED_FLOWS.values())
            for ends, flow in MIXED_FLOWS.items():  # the router's promise: within one request of the plan
                assert abs(taken.count(ends) - 16 * flow / total) < 1
            until_idle(http)
            assert gauge(http, "hexgen2_route_kv_bytes_total") > 0
            assert http.get("/health").status_code == 200
            fork_server = next(e for e in server.family() if "forkserver" in " ".join(e.cmdline()[:4]))
            workers = sorted(fork_server.children(), key=lambda each: each.pid)
            whole = http.post("/v1/completions", json=long).json()["choices"][0]["text"]
            assert stream(http, long, 8, workers[1].kill) == [whole] * 8  # the second rank of mixed-0
            assert gauge(http, "hexgen2_requests_resumed_total") > 0
            live = Placement.model_validate(http.get("/placement").json())
            assert violations(live) == []
            assert {replica.id for replica in live.replicas} == {"mixed-1", "prefill-0", "decode-0"}
            again = http.post("/v1/completions", json=short).json()
            assert again["choices"] == answers[0].json()["choices"]
            until_idle(http)
        assert server.interrupt() == 0
    finally:
        server.close()


def test_a_launched_fleet_sends_only_long_prompts_to_a_route_for_them(placement, model_folder, tmp_path):
    pair, least = ("prefill-0", "mixed-1"), 30
    routes = [
        route.model_copy(update={"min_prompt_tokens": least}) if (route.from_, route.to) == pair else route
        for route in placement.routes
    ]
    limited = placement.model_copy(update={"routes": routes})
    assert violations(limited) == []
    server = Server(model_folder, tmp_path, placement=limited)
    try:
        server.until_serving()
        with httpx.Client(base_url=server.url, timeout=SECONDS) as http:

            def taken(tokens, count):
                body = {"model": placement.model.name, "prompt": [3] * tokens, "max_tokens": 4}
                answers = [http.post("/v1/completions", json=body) for _ in range(count)]
                assert {answer.status_code for answer in answers} == {200}
                return [
                    tuple(answer.headers[f"x-hexgen2-{phase}-replica"] for phase in ("prefill", "decode"))
                    for answer in answers
                ]

            assert pair not in taken(least - 1, 16)
            share = MIXED_FLOWS[pair] / sum(MIXED_FLOWS.values())
            assert taken(least, 16).count(pair) >= 32 * share - 1  # its share of all 32
            until_idle(http)
        assert server.interrupt() == 0
    finally:
        server.close()


def test_the_workers_of_mixed_replicas_send_and_hold_batches(placement, model_folder):
    routes = routes_of(placement)
    assert {(r.prefill, r.decode): r.weight for r in routes} == MIXED_FLOWS
    assert Route("mixed-0", "mixed-0", 0.5) in routes
    senders = {gpu for r in placement.replicas if r.id != "decode-0" for gpu in r.gpus}
    assert emulated_links(placement).keys() == senders
    configured = configurations(placement, model_folder, "bfloat16", EngineOptions(emulate_links=True))
    assert {gpu for gpu, each in configured.items() if each.kv_links} == senders
    assert {configured[gpu].role for gpu in ("box/0", "box/2")} == {"mixed"}
    longest, budgets = placement.model.max_position, kv_budgets(placement)
    prefill, mixed = placement.replica("prefill-0"), placement.replica("mixed-0")
    isl = placement.workload.isl
    kept = outgoing_tokens(mixed, placement)
    all_sent = outgoing_prompts(mixed.engine.chunk_tokens / isl, len(mixed.stages)) * isl
    from_it = {pair: flow for pair, flow in MIXED_FLOWS.items() if pair[0] == "mixed-0"}
    share = 1 - from_it["mixed-0", "mixed-0"] / sum(from_it.values())
    assert 0 < share < 1
    assert kept == math.ceil(max(isl, share * all_sent + min(2, mixed.max_batch / 20) * isl))
    assert budgets["mixed-0"] == 2 * mixed.max_batch * longest + math.ceil(all_sent)
    assert outgoing_tokens(prefill, placement) is None
