"""Simulated replicas whose layers have a window hold as many requests as these layers have room for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from placements import CORE, placement_of, replica_of
from stepping import Times, engine_of

from cluster_specs.loader import resolve
from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.architecture import ModelArchitecture
from cost_model.lengths import Window
from cost_model.models import shipped_model
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement, Route
from hexgen2.replica import EngineSettings
from hexgen2.simulator.records import Records
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.lengths import RequestClass, Workload
from hexgen2.workload.requests import Requests
from runtime.routing.windowed_room import WindowedAccount, WindowedRoom

WINDOW = 256


def planned(names: dict[str, int], full: tuple[int, ...], window: int | None = WINDOW) -> Placement:
    """These replicas, of so many stages each, with the window in all layers but some; for short requests."""
    # Not a copy, which would keep what was computed of the model without windows.
    layers = {"sliding_window": window, "full_attention_layers": full}
    model = ModelArchitecture(**{**shipped_model("opt-30b").model_dump(), **layers})
    card = CORE.model_copy(
        update={
            "memory_gib": 85 / max(names.values()),
            "bf16_dense_tflops": 100,
            "memory_bandwidth_gbyte_s": 900,
        }
    )
    box = NodeSpec(name="box", accelerators=f"Core:{sum(names.values())}", interconnect="shared-memory")
    cluster, first, replicas = ClusterSpec(name="box", nodes=[box], accelerators={"Core": card}), 0, []
    for name, stages in names.items():
        parts = [(f"box/{first + k}", model.layers // stages) for k in range(stages)]
        replica = replica_of(name, parts, max_batch=400)
        engine = EngineSettings(step_tokens=512, chunk_tokens=128)
        replicas.append(replica.model_copy(update={"engine": engine}))
        first += stages
    workload = Workload(name="short", classes=(RequestClass(name="short", isl=200, osl=60),))
    placement = placement_of(cluster, model, workload, replicas, [])
    if len(replicas) == 1:
        return placement
    rates = {"flow_req_s": 1.0, "capacity_req_s": 2.0}
    routes = [Route.between(*replicas, placement.costs().kv_bytes_per_layer, **rates)]
    return placement.model_copy(update={"routes": routes})


def simulated(placement: Placement, isl: int, osl: int, count: int = 60) -> Simulation:
    """The placement under requests that all come at once."""
    records = Records(Requests(np.zeros(count), np.full(count, isl), np.full(count, osl), "alike"))
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    simulation = Simulation(placement, cluster, records)
    simulation.run()
    return simulation


SHAPES = [{"prefill-0": 1, "decode-0": 1}, {"colocated-0": 1}, {"colocated-0": 2}]


@pytest.mark.parametrize("full", [(), (3, 30)])
@pytest.mark.parametrize("names", SHAPES)
def test_all_room_is_free_again(names: dict[str, int], full: tuple[int, ...]) -> None:
    found = simulated(planned(names, full), 1500, 300)
    assert found.records.failed == {}
    replicas = {**found._prefill_replicas, **found._decode_replicas, **found._colocated_replicas}
    for name, budget in found.kv_budgets.items():
        account, replica = budget.windowed, replicas[name]
        assert account is not None and account._taken == budget.held_tokens == 0
        assert replica._windowed.free == account.room.tokens


@pytest.mark.parametrize("names", SHAPES)
def test_long_requests_run_beside_each_other(names: dict[str, int]) -> None:
    """More than where the same memory keeps all tokens."""
    windowed, plain = planned(names, ()), planned(names, (), window=None)
    peaks = [
        simulated(each, 1500, 300).records.replicas[[*names][-1]].peak_running for each in (windowed, plain)
    ]
    assert peaks[0] > 1.5 * peaks[1] > 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_requests_are_preempted_where_windows_lack_room(in_flight: int) -> None:
    """However much the other layers have, and all end."""
    room = WindowedRoom(tokens=200, window=48, running=16, block_tokens=8)
    rows, times = [(0.0, 20 + k, 90) for k in range(6)], Times(in_flight)
    times.costs.model.window = Window(48)
    engine, clock, records, record = engine_of(rows, 10_000, 6, times=times, windowed=WindowedAccount(room))
    for k, (at, *_) in enumerate(rows):
        clock.schedule(at, lambda now, k: engine.submit(k, now), k)
    clock.run()
    assert record.preemptions > 0 and engine._windowed.free == 200
    assert np.isfinite(records.end_s).all()
