"""A driver's account of KV heads: a model of the devices checks that every head finds its tokens where the
steps say, while heads move and attention workers come and go."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from runtime.headwise.pool import HeadPool
from runtime.headwise.room import budget_tokens, largest_tokens
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import HeadDevice, HeadLane, Prefill
from runtime.worker.scheduler import Scheduler

SIZE = 4
LIKE = (1e-6, 1e-9, 0.0, 0.0, 0.0)
SLOWER = (3e-6, 3e-9, 1e-6, 0.0, 0.0)


def lanes(*blocks: tuple[int, ...], heads: int = 4) -> tuple[HeadLane, ...]:
    """A lane for each tuple of blocks: of its worker, then of attention workers."""
    return tuple(
        HeadLane(
            worker=f"own/{number}",
            layers=2,
            heads=heads,
            query_heads=2,
            head_bytes=64.0,
            devices=tuple(
                HeadDevice(worker=f"a/{d}" if d else f"own/{number}", blocks=count, profile=profile)
                for d, (count, profile) in enumerate(zip(own, (LIKE, LIKE, SLOWER), strict=False))
            ),
        )
        for number, own in enumerate(blocks)
    )


def pool_of(shapes: tuple[HeadLane, ...], theta: float = 0.5) -> HeadPool:
    return HeadPool(SimpleNamespace(lanes=shapes, block_tokens=SIZE, theta=theta), token_bytes=32)


class Devices:
    """What the executors and attention workers do with the messages of steps: every slot remembers the
    request, head and position that was written last."""

    def __init__(self, shapes: tuple[HeadLane, ...]) -> None:
        self.shapes = shapes
        self.slots: dict[tuple[int, int], dict[int, tuple]] = {}
        self.tables: dict[tuple[int, int, str, int], list[int]] = {}
        self.device: dict[tuple[int, str, int], int] = {}
        self.remote_rows = 0

    def forget(self, request: str) -> None:
        self.tables = {key: blocks for key, blocks in self.tables.items() if key[2] != request}
        self.device = {key: device for key, device in self.device.items() if key[1] != request}

    def slot(self, key: tuple[int, int, str, int], token: int) -> int:
        return self.tables[key][token // SIZE] * SIZE + token % SIZE

    def run(self, step, leaving: set[str]) -> None:
        for request in step.preempted:
            self.forget(request)
        for grant in step.grants:
            where = grant.lane, grant.request_id, grant.head
            assert self.device.setdefault(where, grant.device) == grant.device
            key = grant.lane, grant.device, grant.request_id, grant.head
            self.tables.setdefault(key, []).extend(grant.blocks)
        for haul in step.hauls:
            self.haul(haul)
        for sequence in step.sequences:
            for lane, shape in enumerate(self.shapes):
                for head in range(shape.heads):
                    self.attend(lane, head, sequence, sequence.request_id in leaving)

    def haul(self, haul) -> None:
        source = haul.lane, haul.source, haul.request_id, haul.head
        target = haul.lane, haul.target, haul.request_id, haul.head
        assert self.tables[source] and haul.end_token > haul.first_token
        if haul.first_token == 0:
            self.tables.pop(target, None)
        self.tables.setdefault(target, []).extend(haul.blocks)
        there = self.slots.setdefault(target[:2], {})
        for token in range(haul.first_token, haul.end_token):
            there[self.slot(target, token)] = self.slots[source[:2]][self.slot(source, token)]
        if haul.switches:
            self.device[haul.lane, haul.request_id, haul.head] = haul.target

    def attend(self, lane: int, head: int, sequence, leaves: bool) -> None:
        device = self.device[lane, sequence.request_id, head]
        key = lane, device, sequence.request_id, head
        there = self.slots.setdefault((lane, device), {})
        self.remote_rows += device > 0
        end = sequence.position + len(sequence.tokens)
        assert len(self.tables[key]) * SIZE >= end
        assert max(self.tables[key]) < self.shapes[lane].devices[device].blocks
        for token in range(sequence.position, end):
            there[self.slot(key, token)] = sequence.request_id, lane, head, token
        if not leaves:
            for token in range(end):
                assert there[self.slot(key, token)] == (sequence.request_id, lane, head, token)


def make(shapes: tuple[HeadLane, ...], stages: int = 1, theta: float = 0.5, batch: int = 8):
    pool = pool_of(shapes, theta)
    scheduler = Scheduler(
        max_batch=batch, max_prefill_tokens=40, max_mixed_tokens=16, in_flight=stages, pool=pool
    )
    return scheduler, pool, Devices(shapes)


def request(name: str, tokens: int, max_tokens: int) -> Prefill:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return Prefill(request_id=name, prompt=(1,) * tokens, sampling=sampling, target="")


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_heads_find_their_tokens_whatever_happens(stages: int, seed: int) -> None:
    rng = random.Random(seed)
    shapes = lanes((30, 24, 40), (30, 24, 40))
    scheduler, pool, devices = make(shapes, stages, theta=0.0)
    longest = largest_tokens(shapes, SIZE)
    wanted = {f"r{k}": (rng.randint(1, 40), rng.randint(1, longest - 40)) for k in range(30)}
    coming, flight, ended, lost = list(wanted.items()), [], set[str](), list[tuple[str, str]]()
    leaving = set[str]()
    for _ in range(100_000):
        if len(ended) == len(wanted):
            break
        if coming and rng.random() < 0.1:
            name, (tokens, more) = coming.pop()
            scheduler.prefill(request(name, tokens, more))
        if rng.random() < 0.02 and not lost:
            worker = rng.choice(["a/1", "a/2"])
            lost = [(lane.worker, worker) for lane in shapes]
            for lane, _ in lost:
                for name in pool.lose(lane, worker):
                    if scheduler.spoil(name):
                        leaving.add(name)
        if lost and rng.random() < 0.1:
            pool.regain(*lost.pop())
        if rng.random() < 0.01 and (names := [n for n in wanted if n in scheduler]):
            name = rng.choice(names)
            if scheduler.cancel(name):
                devices.forget(name)
                ended.add(name)
        if step := scheduler.next_step():
            step = pool.attach(step)
            leaving -= set(step.preempted)
            devices.run(step, leaving)
            flight.append(step)
        if flight and (len(flight) == stages or rng.random() < 0.5):
            step = flight.pop(0)
            done = scheduler.complete(step.step, [5 for s in step.sequences if s.samples])
            for name in done.released:
                devices.forget(name)
                ended.add(name)
    assert ended == set(wanted)
    for worker, lane in [(worker, lane) for lane, worker in lost]:
        pool.regain(lane, worker)
    assert pool.free == budget_tokens(shapes, SIZE) // SIZE
    assert devices.remote_rows > 0 and pool.counts().redispatches > 0


def run_all(scheduler: Scheduler, pool: HeadPool, devices: Devices, most: int = 100_000) -> int:
    """Run steps until none is left; returns how many tokens there were."""
    tokens = 0
    for _ in range(most):
        step = scheduler.next_step()
        if step is None:
            return tokens
        devices.run(pool.attach(step), set())
        done = scheduler.complete(step.step, [5 for s in step.sequences if s.samples])
        tokens += len(done.outputs)
        for name in done.released:
            devices.forget(name)
    raise AssertionError("the steps do not end")


def test_the_longest_request_runs_alone_and_nothing_longer_is_promised() -> None:
    shapes = lanes((11, 7, 9))
    longest = largest_tokens(shapes, SIZE)
    assert longest == 5 * SIZE < budget_tokens(shapes, SIZE)
    scheduler, pool, devices = make(shapes)
    assert pool.blocks * SIZE == longest and pool.fits(longest) and not pool.fits(longest + 1)
    scheduler.prefill(request("a", 1, longest - 1))
    assert run_all(scheduler, pool, devices) == longest - 1


def test_requests_that_outgrow_a_device_move_rather_than_begin_again() -> None:
    shapes = lanes((24, 24, 60), heads=2)
    scheduler, pool, devices = make(shapes)
    for name in "ab":
        scheduler.prefill(request(name, 8, 80))
    assert run_all(scheduler, pool, devices) == 160
    assert pool.counts().redispatches > 0 and pool.counts().hauled_bytes > 0
    assert scheduler.preemptions == 0


def test_several_that_begin_together_are_dispatched_as_evenly_as_they_can_be() -> None:
    shapes = lanes((90, 90, 90), heads=4)
    scheduler, pool, devices = make(shapes)
    for name in "abc":
        scheduler.prefill(request(name, 8, 2))
    step = pool.attach(scheduler.next_step())
    devices.run(step, set())
    counts = {device: sum(g.device == device for g in step.grants) for device in range(3)}
    assert sum(counts.values()) == 12 and counts[2] < min(counts[0], counts[1])
    assert abs(counts[0] - counts[1]) <= 1


def test_what_has_no_room_without_a_lost_worker_waits_and_lets_others_pass() -> None:
    shapes = lanes((8, 24), heads=2)
    scheduler, pool, devices = make(shapes)
    pool.lose("own/0", "a/1")
    scheduler.prefill(request("large", 30, 2))
    scheduler.prefill(request("small", 5, 2))
    step = pool.attach(scheduler.next_step())
    assert [sequence.request_id for sequence in step.sequences] == ["small"]
    devices.run(step, set())
    assert not scheduler.complete(step.step, [5]).released
    pool.regain("own/0", "a/1")
    assert run_all(scheduler, pool, devices) == 3


def test_only_requests_with_heads_on_a_lost_worker_are_computed_again() -> None:
    shapes = lanes((60, 16), heads=2)  # the attention worker has no room for a head of the large one
    scheduler, pool, devices = make(shapes)
    for name, tokens in (("large", 70), ("small", 5)):
        scheduler.prefill(request(name, tokens, 9))
        for _ in range(2):
            devices.run(step := pool.attach(scheduler.next_step()), set())
            scheduler.complete(step.step, [5 for sequence in step.sequences if sequence.samples])
    assert pool.lose("own/0", "a/1") == ["small"] and scheduler.spoil("small")
    step = pool.attach(scheduler.next_step())
    devices.run(step, set())
    assert step.preempted == ("small",)
    assert [(s.request_id, s.position, len(s.tokens)) for s in step.sequences] == [
        ("large", 72, 1),
        ("small", 0, 7),
    ]
    assert {grant.device for grant in step.grants if grant.request_id == "small"} == {0}


def test_a_worker_counts_again_once_every_lane_has_reached_it() -> None:
    shapes = lanes((8, 24), (8, 24), heads=2)
    pool = pool_of(shapes)
    pool.lose("own/0", "a/1")
    pool.lose("own/1", "a/1")
    pool.regain("own/1", "a/1")
    assert pool.counts().away == ("a/1",) and pool.free == 4
    pool.regain("own/0", "a/1")
    assert pool.counts().away == () and pool.free == 16
