"""A fleet of workers whose layers have a window runs as many long requests at once as their blocks hold."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest
from checkpoints import LAYERS, WRITERS, greedy
from live_fleet import live_fleet, tokens_of
from placements import CORE, placement_of, replica_of

from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.config import architecture_from_folder
from hexgen2.placement import Placement, Route
from hexgen2.replica import EngineSettings
from hexgen2.workload.lengths import RequestClass, Workload
from runtime.frontend.in_flight import InFlight
from runtime.frontend.replica import Replica
from runtime.options import EngineOptions
from runtime.protocol.to_workers import Configure
from runtime.routing.kv_division import divided

SIZE, ROOM, TOKENS = 8, 640, 12
"""Tokens of a block; of KV cache, if all layers kept all tokens; and of an answer."""


def planned(folder: Path, prefills: bool) -> Placement:
    """A prefill and a decode replica, or a colocated one, on cores of one box, for short requests."""
    workload = Workload(name="short", classes=(RequestClass(name="short", isl=40, osl=TOKENS),))
    names = ["prefill-0", "decode-0"] if prefills else ["colocated-0"]
    replicas = [replica_of(name, [(f"box/{k}", LAYERS)], max_batch=64) for k, name in enumerate(names)]
    steps = EngineSettings(step_tokens=64, chunk_tokens=32)
    replicas = [replica.model_copy(update={"engine": steps}) for replica in replicas]
    box = NodeSpec(name="box", accelerators=f"Core:{len(names)}", interconnect="shared-memory")
    cluster = ClusterSpec(name="box", nodes=[box], accelerators={"Core": CORE})
    alone = placement_of(cluster, architecture_from_folder(folder), workload, replicas, [])
    if not prefills:
        return alone
    rates = {"flow_req_s": 1.0, "capacity_req_s": 2.0}
    route = Route.between(replicas[0], replicas[1], alone.costs().kv_bytes_per_layer, **rates)
    return alone.model_copy(update={"routes": [route]})


@pytest.mark.parametrize("prefills", [True, False])
def test_more_long_requests_run_at_once_than_their_tokens_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefills: bool
) -> None:
    """Of 640 tokens of memory, which would hold three of these, and none is refused by a worker."""
    folder, rng = WRITERS["mistral"](tmp_path / "model"), random.Random(5)
    prompts = [[rng.randrange(3, 250) for _ in range(rng.randrange(150, 220))] for _ in range(14)]
    placement = planned(folder, prefills)

    def short_of_memory(told: Configure) -> Configure:
        replica = placement.replica(told.replica)
        whole, room = divided(placement, replica, placement.costs(), ROOM, 0, SIZE)
        assert told.windowed is not None
        windowed = msgspec.structs.replace(told.windowed, kv_budget_tokens=room.tokens)
        return msgspec.structs.replace(told, kv_budget_tokens=whole, windowed=windowed)

    async def scenario() -> int:
        options, most = EngineOptions(dtype="float32", block_tokens=SIZE), 0
        async with live_fleet(placement, folder, options=options, change=short_of_memory) as fleet:
            decoder = fleet.coordinator.replicas[placement.replicas[-1].id]
            asked = [asyncio.create_task(tokens_of(fleet.submit(prompt, TOKENS))) for prompt in prompts]
            while not all(task.done() for task in asked):
                most = max(most, len(decoder.held))
                await asyncio.sleep(0.002)
            assert [task.result() for task in asked] == greedy(folder, prompts, TOKENS)
            await fleet.settle()
            assert decoder.preemptions == 0
        return most

    answers, answered = list[bool](), InFlight._on_reserved

    def note(self: InFlight, replica: Replica, request_id: str, ok: bool, cached_tokens: int) -> None:
        answers.append(ok)
        answered(self, replica, request_id, ok, cached_tokens)

    monkeypatch.setattr(InFlight, "_on_reserved", note)
    assert asyncio.run(scenario()) >= 6
    assert answers == [True] * (len(prompts) if prefills else 0)
