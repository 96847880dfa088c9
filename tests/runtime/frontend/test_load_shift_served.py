"""The front end moves shares when requests wait and are not as long as planned, says so, and loses none."""

import logging

import pytest
from placements import CORE, placement_of, replica_of
from problems import problem_from
from scripted import PROMPT, run, sampling, serving, settle, tokens_of

from cluster_specs.loader import resolve
from cluster_specs.schema import ClusterSpec
from hexgen2.placement import Route
from runtime.api.metrics import Metrics
from runtime.routing import load_shift, pressure
from runtime.routing.load_shift import LoadShift
from runtime.routing.reflow import Reflow


@pytest.fixture
def plan(tmp_path):
    """A prefill replica whose prompts a decode or a mixed one continues, which serves others alone. It can do
    as many answers as prompts, and does either about as long."""
    card = CORE.model_copy(update={"memory_gib": 64})
    cluster = ClusterSpec(
        name="box", nodes=[{"name": "n", "accelerators": "Core:3"}], accelerators={"Core": card}
    )
    problem = problem_from(resolve(cluster, "box", tmp_path), "opt-13b", "HPHD")
    layers = problem.model.layers
    replicas = [
        replica_of(f"{role}-0", [(f"n/{k}", layers)], capacity_req_s=2.0, region=region)
        for k, (role, region) in enumerate(
            [("prefill", None), ("decode", None), ("mixed", [(0.0, 4.0), (4.0, 0.0)])]
        )
    ]
    pairs = {("prefill-0", "decode-0"): 1.5, ("prefill-0", "mixed-0"): 0.5, ("mixed-0", "mixed-0"): 1.5}
    routes = [
        Route(from_=p, to=d, flow_req_s=flow, capacity_req_s=9.0, kv_bytes_per_req=0.0)
        for (p, d), flow in pairs.items()
    ]
    return Reflow(placement_of(problem.spec, problem.model, problem.workload, replicas, routes))


def test_short_prompts_move_shares_with_a_word_to_the_operator(plan, monkeypatch, caplog):
    monkeypatch.setattr(load_shift, "FEWEST", 20)
    monkeypatch.setattr(load_shift, "WORTHWHILE", 0.0)
    monkeypatch.setattr(pressure, "WINDOW", 20)

    async def scenario():
        metrics = Metrics()
        options = {"plan": plan, "shifts": LoadShift.of, "observer": metrics}
        async with serving(plan.routes(()), **options) as (coordinator, _):
            metrics.watch(coordinator)
            before = {(r.prefill, r.decode): r.weight for r in coordinator._admission.router.routes}
            for _ in range(4):
                # More than there is room for.
                requests = [coordinator.submit(PROMPT, sampling()) for _ in range(60)]
                for request in requests:
                    assert len(await tokens_of(request)) == 4
            assert coordinator.share_moves == 1
            assert b"hexgen2_share_moves_total 1.0" in metrics.text()
            after = {(r.prefill, r.decode): r.weight for r in coordinator._admission.router.routes}
            assert after.keys() == before.keys() and after != before
            await settle(coordinator)

    with caplog.at_level(logging.WARNING, logger="runtime.frontend.coordinator"):
        run(scenario)
    (line,) = [r.getMessage() for r in caplog.records if "so shares move" in r.getMessage()]
    assert "about 3 prompt tokens" in line


def test_shares_stay_where_that_is_asked_for(plan, monkeypatch):
    monkeypatch.setattr(load_shift, "FEWEST", 20)

    async def scenario():
        async with serving(plan.routes(()), plan=plan) as (coordinator, _):
            for _ in range(60):
                await tokens_of(coordinator.submit(PROMPT, sampling()))
            assert coordinator.share_moves == 0
            assert list(coordinator._admission.router.routes) == plan.routes(())
            await settle(coordinator)

    run(scenario)
