"""Mixed replicas that prefill for each other, with real workers: in memory for barely two requests, and while
their workers are killed in the middle of a transfer. Every token is the one that transformers gives."""

import asyncio
import random

import pytest
from live_fleet import LIMIT_S, live_fleet, tokens_of
from placements import placement_of, replica_of
from served import CAPACITY_REQ_S, REGION, make_placement

import runtime.frontend.supervisor
from cluster_specs.schema import InterconnectSpec
from hexgen2.placement import Route
from hexgen2.replica import EngineSettings
from runtime.options import EngineOptions

PAIR = {"mixed-0": [("box/0 box/1", 4)], "mixed-1": [("box/2", 3), ("box/3", 1)]}
THREE = PAIR | {"mixed-2": [("box/4", 4)]}
BLOCK = 16
SLOW = InterconnectSpec(bandwidth_gbyte_s=0.004, latency_us=10_000)
"""A prompt's KV cache takes some tens of milliseconds."""


def fleet_of(model_folder, shapes, own_flow, engine=None, interconnect=None):
    """Mixed replicas with routes between all pairs, and to themselves with `own_flow` in requests/s."""
    like = make_placement(model_folder)
    flows = {(a, b): own_flow if a == b else 1.0 for a in shapes for b in shapes}
    replicas = [
        replica_of(name, stages, max_batch=4, capacity_req_s=CAPACITY_REQ_S, region=REGION).model_copy(
            update={"engine": engine or EngineSettings()}
        )
        for name, stages in shapes.items()
    ]
    routes = [
        Route(
            from_=a,
            to=b,
            flow_req_s=flow,
            capacity_req_s=CAPACITY_REQ_S,
            kv_bytes_per_req=0.0 if a == b else 32 * like.model.kv_bytes_per_token,
        )
        for (a, b), flow in flows.items()
        if flow
    ]
    node = like.cluster.nodes[0].model_copy(update={"interconnect": interconnect or "shared-memory"})
    cluster = like.cluster.model_copy(update={"nodes": [node]})
    return placement_of(cluster, like.model, like.workload, replicas, routes)


def asked(reference, count, longest, seed):
    """Prompts, half of which share their beginning with others, how many tokens each gets, and these."""
    rng = random.Random(seed)
    common = [rng.randrange(16, 90) for _ in range(longest // 2)]
    found = []
    for _ in range(count):
        shared = common[: rng.choice([0, BLOCK, longest // 2])]
        prompt = [*shared, *(rng.randrange(16, 90) for _ in range(rng.randint(1, longest - len(shared) - 1)))]
        tokens = rng.randint(1, longest)
        found.append((prompt, tokens, reference.greedy(prompt, tokens)))
    return found


def run(scenario):
    async def limited():
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    asyncio.run(limited())


# The chunk says what is kept for prompts for others: some of the memory, or more than there is.
@pytest.mark.parametrize(("own_flow", "chunk"), [(0.5, 16), (0.0, 2048)])
def test_two_replicas_with_room_for_two_requests_send_to_each_other(model_folder, reference, own_flow, chunk):
    longest = 48
    engine = EngineSettings(step_tokens=64, chunk_tokens=chunk)
    placement = fleet_of(model_folder, PAIR, own_flow, engine)
    questions = asked(reference, 10, longest, 3)

    async def scenario():
        tokens = 2 * 2 * longest + BLOCK
        async with live_fleet(placement, model_folder, kv_tokens=tokens) as fleet:
            requests = [fleet.submit(prompt, count) for prompt, count, _ in questions * 2]
            for request, (*_, expected) in zip(requests, questions * 2, strict=True):
                assert await tokens_of(request) == expected
            await fleet.settle()
            taken = {(request.record.prefill_replica, request.record.decode_replica) for request in requests}
            assert {("mixed-0", "mixed-1"), ("mixed-1", "mixed-0")} <= taken
            for replica in fleet.coordinator.replicas.values():
                assert replica.free_blocks == tokens // BLOCK and not replica.held_tokens
            assert fleet.coordinator.lost == {}

    run(scenario)


def test_mixed_replicas_are_killed_in_mid_transfer_and_in_mid_stream(model_folder, reference, monkeypatch):
    monkeypatch.setattr(runtime.frontend.supervisor, "FIRST_WAIT_S", 0.01)
    placement = fleet_of(model_folder, THREE, 0.5, interconnect=SLOW)
    questions = asked(reference, 16, 100, 4)
    kills = [
        ("mixed-0", "mixed-1", "box/3"),  # the last stage of the receiver
        ("mixed-1", "mixed-0", "box/3"),  # the last stage of the sender
        ("mixed-1", "mixed-0", "box/1"),  # the second rank of the receiver
        ("mixed-0", "mixed-1", "box/0"),  # the driver of the sender
        ("mixed-2", "mixed-2", "box/4"),  # one that decodes what it has prefilled
    ]

    def halfway(fleet, prefill, decode):
        """Requests whose KV cache is on its way, or that decode where they were prefilled."""
        return [
            request
            for request in fleet.requests
            if not request.has_ended
            and (request.record.prefill_replica, request.record.decode_replica) == (prefill, decode)
            and request.record.output_tokens
            and (prefill == decode or not request.record.kv_arrived)
        ]

    async def client(fleet, rng, stopped):
        while not stopped.is_set():
            prompt, count, expected = rng.choice(questions)
            assert await tokens_of(fleet.submit(prompt, count)) == expected

    async def scenario():
        options = EngineOptions(emulate_links=True)
        async with live_fleet(placement, model_folder, restarts=100, options=options) as fleet:
            stopped = asyncio.Event()
            tasks = [asyncio.create_task(client(fleet, random.Random(k), stopped)) for k in range(6)]

            def may_strike():
                # A request that is on board of two deaths ends.
                on_board = any(request.deaths and not request.has_ended for request in fleet.requests)
                return not fleet.coordinator.lost and not on_board

            async def until(what):
                await fleet.until(lambda: what() or any(task.done() for task in tasks))

            try:
                for prefill, decode, worker in kills:
                    hit = False
                    while not hit and not any(task.done() for task in tasks):
                        await until(lambda a=prefill, b=decode: may_strike() and halfway(fleet, a, b))
                        struck = halfway(fleet, prefill, decode)
                        fleet.kill(worker)
                        await until(lambda: fleet.coordinator.lost)
                        hit = any(request.record.resumes for request in struck)  # or it was just over
                await until(lambda: not fleet.coordinator.lost)
                stopped.set()
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            await fleet.settle()
            again = [fleet.submit(prompt, count) for prompt, count, _ in questions]
            for request, (*_, expected) in zip(again, questions, strict=True):
                assert await tokens_of(request) == expected
            assert any(request.record.cached_tokens for request in fleet.requests)
            assert not fleet.coordinator.lost

    run(scenario)
