"""When the replanner searches, and without which GPUs: replicas that stay lost, machines that go or
return."""

import asyncio

import pytest
from scripted import Starter, run, serving, until
from served import make_mixed_placement, make_placement

import runtime.frontend.supervisor
from cost_model.errors import HexGen2Error
from runtime.frontend.replanner import Replanner, broken, renamed
from runtime.frontend.supervisor import Supervisor
from runtime.routing.router import Route

ROUTES = [Route(prefill, decode, 1.0) for prefill in ("p0", "p1") for decode in ("d0", "d1")]
NAMES = {"prefill-0": "p0", "prefill-1": "p1", "decode-0": "d0", "decode-1": "d1"}
AFTER_S = 0.2


class Machines(Starter):
    """Restarts that wait until the test allows them, on machines of which some are gone."""

    def __init__(self):
        super().__init__()
        self.gone, self.changed = set(), asyncio.Event()

    def unreachable(self, workers):
        return [worker for worker in workers if worker in self.gone]

    async def until_reachable(self, workers):
        while self.unreachable(workers):
            self.changed.clear()
            await self.changed.wait()

    def back(self):
        self.gone.clear()
        self.changed.set()


class Searched(Replanner):
    """A search that finds nothing, and records what it was asked."""

    async def _search(self, lost, back):
        self.searches.append((list(lost), list(back)))
        raise HexGen2Error("nothing fits")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(runtime.frontend.supervisor, "FIRST_WAIT_S", 0.001)


@pytest.fixture
def placement(model_folder):
    """p0 has GPU 0, p1 has 1 and 2, d0 has 3 and 4, d1 has 5."""
    placement = make_placement(model_folder)
    replicas = [each.model_copy(update={"id": NAMES[each.id]}) for each in placement.replicas]
    return placement.model_copy(update={"replicas": replicas})


def replanning(placement, coordinator, machines, restarts=3):
    said = []
    supervisor = Supervisor(coordinator, machines, restarts, said.append)
    coordinator._on_lost = supervisor.lost
    replanner = Searched(placement, coordinator, machines, supervisor, None, AFTER_S, said.append)
    replanner.searches = []
    supervisor.on_stays_lost(replanner.stays_lost)
    replanner.start()
    return supervisor, replanner, said


def lose(coordinator, name):
    coordinator._lose(coordinator.replicas[name], "killed")


def test_a_gone_machine_takes_all_its_gpus_and_is_searched_without_once(placement):
    async def scenario():
        async with serving(ROUTES) as (coordinator, _):
            machines = Machines()
            supervisor, replanner, said = replanning(placement, coordinator, machines)
            machines.gone = {"n/d1", "box/5", "box/4"}
            lose(coordinator, "d1")
            await until(lambda: replanner.searches)
            assert replanner.searches == [(["box/4", "box/5"], [])]
            await until(lambda: said[-1] == "replica d1 waits for n/d1")  # it keeps waiting
            await asyncio.sleep(3 * AFTER_S)
            assert len(replanner.searches) == 1
            assert replanner.ask()
            await until(lambda: len(replanner.searches) == 2)
            machines.gone.add("n/p0")
            lose(coordinator, "p0")
            await until(lambda: len(replanner.searches) == 3)
            assert replanner.searches[-1] == (["box/0", "box/4", "box/5"], [])
            machines.back()
            await until(lambda: not coordinator.lost)
            await asyncio.sleep(3 * AFTER_S)
            assert len(replanner.searches) == 3 and not replanner.ask()
            await replanner.stop()
            await supervisor.stop()

    run(scenario)


def test_a_new_placement_takes_over_the_names_of_mixed_replicas_that_run(model_folder):
    found = make_mixed_placement(model_folder)
    alive = {
        {"mixed-0": "mixed-1", "mixed-1": "mixed-7"}.get(each.id, each.id): each for each in found.replicas
    }
    for replica in found.replicas:
        replica.region = replica.region and [(p * 2, d) for p, d in replica.region]
    after = renamed(found, alive)
    assert [each.id for each in after.replicas] == list(alive)
    pairs = {(route.from_, route.to): route.flow_req_s for route in after.routes}
    assert pairs["mixed-1", "mixed-1"] == 0.5 and pairs["mixed-7", "mixed-1"] == 1.0
    assert len(pairs) == len(found.routes)


def test_a_machine_that_is_back_in_time_brings_no_search(placement):
    async def scenario():
        async with serving(ROUTES) as (coordinator, _):
            machines = Machines()
            supervisor, replanner, said = replanning(placement, coordinator, machines)
            machines.gone = {"n/d1", "box/5"}
            lose(coordinator, "d1")
            await until(lambda: said)
            machines.back()
            await until(lambda: not coordinator.lost)
            await asyncio.sleep(3 * AFTER_S)
            assert not replanner.searches
            await replanner.stop()
            await supervisor.stop()

    run(scenario)


def test_what_is_being_started_again_is_lost_only_to_who_asks(placement):
    async def scenario():
        async with serving(ROUTES) as (coordinator, _):
            machines = Machines()
            machines.may.clear()
            supervisor, replanner, _ = replanning(placement, coordinator, machines)
            machines.gone = {"n/d1", "box/5"}
            lose(coordinator, "p0")
            lose(coordinator, "d1")
            await until(lambda: replanner.searches)
            assert machines.starts == 1
            assert replanner.ask()
            await until(lambda: len(replanner.searches) == 2)
            assert replanner.searches == [(["box/5"], []), (["box/0", "box/5"], [])]
            machines.may.set()
            machines.back()
            await until(lambda: not coordinator.lost)
            await replanner.stop()
            await supervisor.stop()

    run(scenario)


def test_the_other_gpus_of_a_replica_that_lost_a_machine_are_sound(placement):
    d0, d1 = placement.replica("d0"), placement.replica("d1")
    assert broken([d0, d1], {"box/4"}) == {"box/5"}
    assert broken([d0, d1], set()) == {"box/3", "box/4", "box/5"}
