"""Replicas that turn to another role while requests run: no worker ends, no weights are read again, and every
request gets the tokens that transformers would give it."""

import asyncio
import random
import shutil

import pytest
from live_fleet import LIMIT_S, live_fleet, tokens_of
from placements import placement_of, replica_of
from served import CAPACITY_REQ_S, REGION, make_mixed_placement, small

from cost_model.errors import HexGen2Error
from hexgen2.placement import Placement, Route
from runtime.engine.emulated.tokens import answer
from runtime.launcher.local import LocalLauncher
from runtime.options import EMULATED

ONE, TP2, PP = [("box/4", 4)], [("box/0 box/1", 4)], [("box/2", 3), ("box/3", 1)]
OTHER = [("box/5", 4)]
AFTER = {"decode-1": TP2, "mixed-1": PP, "mixed-2": ONE, "prefill-1": OTHER}
"""mixed-0, prefill-0 and decode-0 turn; mixed-1 stays."""
LAST = {"prefill-2": TP2, "decode-2": PP, "mixed-2": ONE, "mixed-3": OTHER}
"""All turn but mixed-2."""


@pytest.fixture(scope="module")
def before(model_folder):
    return small(make_mixed_placement(model_folder))


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


@pytest.fixture(scope="module")
def asked(reference):
    """Prompts, some with a common beginning, how many tokens each is to get, and these."""
    rng = random.Random(5)
    common = [rng.randrange(16, 90) for _ in range(40)]
    prompts = [
        [*common[: rng.choice([0, 24, 40])], *(rng.randrange(16, 90) for _ in range(9))] for _ in range(10)
    ]
    counts = [rng.choice([8, 60, 120]) for _ in prompts]
    return [(each, count, reference.greedy(each, count)) for each, count in zip(prompts, counts, strict=True)]


def placed(like: Placement, shapes) -> Placement:
    """A placement of replicas of these ids, each of which does what its name says for all others that can."""
    batches = {name: 4 if name in ("mixed-1", "mixed-2") else 6 for name in shapes}
    sends = [name for name in shapes if not name.startswith("decode")]
    takes = [name for name in shapes if not name.startswith("prefill")]
    pairs = [(a, b) for a in sends for b in takes]
    flow = 0.25
    replicas = []
    for name, stages in shapes.items():
        mixed = name.startswith("mixed")
        region = REGION if mixed else None
        one = replica_of(name, stages, max_batch=batches[name], capacity_req_s=CAPACITY_REQ_S, region=region)
        prompts = flow * sum(a == name for a, _ in pairs)
        answers = flow * sum(b == name for _, b in pairs)
        used = one.busy(prompts, answers) if mixed else (prompts + answers) / CAPACITY_REQ_S
        replicas.append(one.model_copy(update={"utilisation": used}))
    size = 32 * like.model.kv_bytes_per_token
    routes = [
        Route(
            from_=a,
            to=b,
            flow_req_s=flow,
            capacity_req_s=CAPACITY_REQ_S,
            kv_bytes_per_req=0.0 if a == b else size,
        )
        for a, b in pairs
    ]
    made = placement_of(like.cluster, like.model, like.workload, replicas, routes)
    return made.model_copy(update={"bound": made.bound.model_copy(update={"req_s": 24.0})})


async def client(fleet, asked, rng, stopped):
    """Send one request after the other, and check every token."""
    answers = 0
    while not stopped.is_set():
        prompt, count, tokens = rng.choice(asked)
        assert await tokens_of(fleet.submit(prompt, count)) == tokens
        answers += 1
    return answers


async def under_load(fleet, asked, change, clients=6):
    """Run a change while clients stream; they go on for a while after it."""
    stopped = asyncio.Event()
    tasks = [asyncio.create_task(client(fleet, asked, random.Random(k), stopped)) for k in range(clients)]
    try:
        await fleet.until(lambda: len(fleet.requests) > clients + 2)
        await change()
        served = len(fleet.requests)
        await fleet.until(lambda: len(fleet.requests) > served + 2 * clients or any(t.done() for t in tasks))
        stopped.set()
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    await fleet.settle()
    return sum(answers)


def run(scenario):
    async def limited():
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    asyncio.run(limited())


def test_replicas_turn_under_load_with_the_weights_that_they_have(before, folder, asked):
    async def scenario():
        async with live_fleet(before, folder) as fleet:
            pids = fleet.pids
            for weights in folder.glob("*.safetensors"):
                weights.unlink()
            await under_load(fleet, asked, lambda: fleet.take_up(placed(before, AFTER)))
            assert "new placement: 1 stay, 3 turn, 0 leave, 0 start" in fleet.said
            assert fleet.coordinator.replicas.keys() == AFTER.keys() and fleet.pids == pids
            begun = len(fleet.requests)
            await under_load(fleet, asked, lambda: fleet.take_up(placed(before, LAST)))
            assert "new placement: 1 stay, 3 turn, 0 leave, 0 start" in fleet.said[-6:]
            assert fleet.coordinator.replicas.keys() == LAST.keys() and fleet.pids == pids
            later = [(r.record.prefill_replica, r.record.decode_replica) for r in fleet.requests[begun:]]
            assert {("prefill-2", "decode-2"), ("mixed-2", "mixed-3")} <= set(later)
            assert fleet.coordinator.lost == {}

    run(scenario)


def test_emulated_replicas_turn_under_load(before, folder):
    rng = random.Random(6)
    prompts = [[rng.randrange(16, 90) for _ in range(30)] for _ in range(6)]
    asked = [(each, 60, answer(each, 60, before.model.vocab)) for each in prompts]

    async def scenario():
        async with live_fleet(before, folder, engine=EMULATED) as fleet:
            pids = fleet.pids
            await under_load(fleet, asked, lambda: fleet.take_up(placed(before, AFTER)))
            assert fleet.coordinator.replicas.keys() == AFTER.keys() and fleet.pids == pids
            assert fleet.coordinator.lost == {}

    run(scenario)


@pytest.mark.parametrize("how", ["killed while it empties", "fails to turn"])
def test_a_replica_that_cannot_turn_starts_anew(before, folder, asked, how, monkeypatch):
    async def fails(*_):
        raise HexGen2Error("no memory")

    async def scenario():
        async with live_fleet(before, folder) as fleet:
            pids = fleet.pids

            async def change():
                if how == "fails to turn":
                    monkeypatch.setattr(LocalLauncher, "turn", fails)
                    await fleet.take_up(placed(before, AFTER))
                    return
                changing = asyncio.create_task(fleet.take_up(placed(before, AFTER)))
                states = fleet.coordinator.states
                await fleet.until(lambda: states["mixed-0"].value == "leaving" or changing.done())
                fleet.kill("box/1")
                await changing

            await under_load(fleet, asked, change)
            assert fleet.coordinator.replicas.keys() == AFTER.keys()
            moved = {gpu for gpu, pid in fleet.pids.items() if pid != pids[gpu]}
            killed = {"box/0", "box/1"}
            assert moved == (killed if how.startswith("killed") else killed | {"box/4", "box/5"})
            assert fleet.coordinator.lost == {}

    run(scenario)
