"""Schedulers in the front end, over scripted drivers: however requests end, no work is left behind."""

import asyncio

import pytest
from scripted import PROMPT, run, sampling, serving, settle, tokens_of, until

from hexgen2.prediction.batch_times import BatchTimes
from hexgen2.schedulers import SCHEDULERS
from hexgen2.workload.classes import load_workload
from runtime.api.metrics import Metrics
from runtime.routing.instances import Instance
from runtime.routing.output_lengths import make_predictor
from runtime.routing.router import Route
from runtime.routing.schedulers import make_router

ROUTES = [
    *(Route("p0", "d0", 2.0), Route("p0", "d1", 1.0), Route("p1", "d0", 1.0)),
    *(Route("p1", "d1", 2.0), Route("c0", "c0", 1.0)),
]
INSTANCE = Instance(2, BatchTimes((1e-4, 0.0, 0.0, 1e-2), (1e-6, 0.0, 0.0, 1e-2), 100, 4))


def router_of(scheduler, predictor=None):
    return lambda routes: make_router(
        scheduler, routes, predictor or make_predictor(None, load_workload("online"))
    )


def nothing_left(coordinator):
    return all(
        len(replica.backlog) == 0 and replica.backlog.work == 0 for replica in coordinator.replicas.values()
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_work_is_taken_back_however_a_request_ends(scheduler):
    async def scenario():
        async with serving(ROUTES, router=router_of(scheduler), instance=INSTANCE) as (coordinator, drivers):
            requests = [coordinator.submit(PROMPT, sampling(5)) for _ in range(12)]
            cancelled = coordinator.submit(PROMPT, sampling(5))
            coordinator.cancel(cancelled)
            assert [len(await tokens_of(request)) for request in requests] == [5] * 12
            await settle(coordinator)
            assert nothing_left(coordinator)
            one = coordinator.submit(PROMPT, sampling(1))
            assert len(await tokens_of(one)) == 1
            drivers["d0"].refusals = drivers["d1"].refusals = 1
            again = [coordinator.submit(PROMPT, sampling(4)) for _ in range(8)]
            assert [len(await tokens_of(request)) for request in again] == [4] * 8
            await settle(coordinator)
            assert nothing_left(coordinator)

    run(scenario)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_requests_of_a_lost_replica_go_on_elsewhere(scheduler):
    async def scenario():
        routes = [Route("c0", "c0", 2.0), Route("c1", "c1", 1.0)]
        async with serving(routes, router=router_of(scheduler), instance=INSTANCE) as (coordinator, drivers):
            for driver in drivers.values():
                driver.gate.clear()
            requests = [coordinator.submit(PROMPT, sampling(5)) for _ in range(8)]
            await asyncio.sleep(0.02)
            drivers["c0"].link.close()
            await until(lambda: "c0" in coordinator.lost)
            lost = coordinator.replicas["c0"].backlog
            assert len(lost) == 0 and lost.work == 0
            drivers["c1"].gate.set()
            assert [await tokens_of(request) for request in requests] == [[300, 301, 302, 303, 304]] * 8
            assert {request.record.decode_replica for request in requests} == {"c1"}
            await settle(coordinator)
            assert nothing_left(coordinator)

    run(scenario)


def test_metrics_show_the_work_where_a_scheduler_counts_it():
    async def scenario():
        for scheduler in ("workload-aware", "flow"):
            metrics = Metrics()
            options = {"router": router_of(scheduler), "instance": INSTANCE, "observer": metrics}
            async with serving([Route("c0", "c0", 1.0)], **options) as (coordinator, drivers):
                metrics.watch(coordinator)
                drivers["c0"].gate.clear()
                request = coordinator.submit(PROMPT, sampling(5))
                text = metrics.text().decode()
                drivers["c0"].gate.set()
                await tokens_of(request)
            shown = [line for line in text.splitlines() if line.startswith("hexgen2_replica_work{")]
            if scheduler == "flow":
                assert shown == []
            else:
                (line,) = shown
                assert float(line.split()[-1]) > 0

    run(scenario)


def test_predictors_learn_from_requests_that_end_by_themselves():
    class Listening:
        def __init__(self):
            self.seen = []

        def predict(self, request):
            assert request.output_limit == 5
            return 3.0

        def learn(self, *finished):
            self.seen.append(finished)

    async def scenario():
        predictor = Listening()
        options = {"router": router_of("workload-aware", predictor), "instance": INSTANCE}
        async with serving([Route("c0", "c0", 1.0)], **options) as (coordinator, drivers):
            drivers["c0"].stop_at["r0"] = 1
            await tokens_of(coordinator.submit(PROMPT, sampling(5)))
            drivers["c0"].gate.clear()
            cancelled = coordinator.submit(PROMPT, sampling(5))
            await asyncio.sleep(0.01)
            coordinator.cancel(cancelled)
            drivers["c0"].gate.set()
            await settle(coordinator)
            assert predictor.seen == [(3, 5, 2)]

    run(scenario)
