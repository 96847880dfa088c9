"""A driver's answers to reservations: each is answered once, and its blocks are freed once."""

import queue
import socket
import threading
from types import SimpleNamespace

import pytest

from runtime.protocol.between_workers import ExpectKv, NewRole, Release, StepResult
from runtime.protocol.framing import Connection
from runtime.protocol.from_workers import Released, Reserved
from runtime.protocol.message import PROTOCOL_VERSION, Sampling
from runtime.protocol.to_workers import Cancel, Configure, Prefill, ReserveKv
from runtime.worker.driver import Driver, StageFree

BLOCKS, SIZE = 10, 4
LIMIT_S = 30.0
REQUEST = ReserveKv(request_id="r0", prompt=(1,) * 6, capacity_tokens=12)
READY = Reserved(request_id="r0", ok=True)
RELEASED = Released(request_id="r0", replica="d", free_blocks=BLOCKS)


class Side:
    """A driver with one other executor; the test plays their threads. With two stages, it plays the main
    thread as well, which takes its steps from `own`."""

    def __init__(self, stages=1):
        ours, theirs = socket.socketpair()
        self.front_end, self.sent, self.inbox = Connection(ours), [], queue.SimpleQueue()
        self.silenced = []
        config = SimpleNamespace(
            replica="d",
            worker="d/0",
            max_batch=4,
            max_prefill_tokens=64,
            max_mixed_tokens=16,
            reuse_prefixes=True,
            stages=("stage",) * stages,
            steps_in_flight=stages,
            kv_lease_s=300.0,
            lanes=(),
            windowed=None,
        )
        executor = SimpleNamespace(
            config=config,
            cache=SimpleNamespace(blocks=BLOCKS, block_tokens=SIZE),
            spec=SimpleNamespace(position_limit=None, vocab=50),
            expect=lambda _: None,
            release=self.silenced.append,
            silence=self.silenced.append,
        )
        other = SimpleNamespace(send=self.sent.append)
        self.own = queue.SimpleQueue() if stages > 1 else None
        self.driver = Driver(executor, Connection(theirs), {"d/1": other}, self.inbox, self.own)

    def handle_inbox(self):
        while not self.inbox.empty():
            self.driver._handle(self.inbox.get())

    def answers(self):
        """The messages sent to the front end; a last reservation of all blocks shows that nothing else is
        held."""
        self.handle_inbox()
        self.driver.reserve(ReserveKv(request_id="last", prompt=(2,) * 39, capacity_tokens=40))
        self.driver.acknowledge("d/1", "last")
        found = []
        while (message := self.front_end.receive()) != Reserved(request_id="last", ok=True):
            found.append(message)
        return found


def acknowledge(side):
    side.driver.acknowledge("d/1", "r0")


def cancel(side):
    side.inbox.put(Cancel(request_id="r0"))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([acknowledge, cancel], [READY, RELEASED]),
        ([cancel], [RELEASED]),
        ([acknowledge, acknowledge, cancel, cancel], [READY, RELEASED]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_reservation_is_answered_once_and_gives_its_blocks_back(events, expected, at_once):
    side = Side()
    side.driver.reserve(REQUEST)
    for event in events:
        event(side)
        if not at_once:
            side.handle_inbox()
    assert side.answers() == expected
    arrival, release, *_ = side.sent
    assert isinstance(arrival, ExpectKv) and (arrival.first_token, arrival.end_token) == (0, 6)
    assert len(set(arrival.table)) == 2
    assert release == Release(request_ids=("r0",))
    assert side.silenced == ["r0"]


def test_an_acknowledgement_after_a_cancel_says_nothing():
    side = Side()
    side.driver.reserve(REQUEST)
    cancel(side)
    side.handle_inbox()
    acknowledge(side)
    assert side.answers() == [RELEASED]


@pytest.mark.parametrize("capacity", [41, 6])
def test_what_never_fits_is_refused_and_holds_nothing(capacity):
    side = Side()
    side.driver.reserve(ReserveKv(request_id="r0", prompt=(1,) * 6, capacity_tokens=capacity))
    assert side.answers() == [Reserved(request_id="r0", ok=False)]
    assert side.sent[:1] != [ExpectKv]


def test_without_free_blocks_a_reservation_is_refused_until_some_come_back():
    side = Side()
    side.driver.reserve(ReserveKv(request_id="big", prompt=(3,) * 36, capacity_tokens=38))
    side.driver.reserve(ReserveKv(request_id="r0", prompt=(1,) * 6, capacity_tokens=12))
    side.driver.acknowledge("d/1", "big")
    side.inbox.put(Cancel(request_id="big"))
    side.handle_inbox()
    side.driver.reserve(REQUEST)
    acknowledge(side)
    cancel(side)
    assert side.answers() == [
        Reserved(request_id="r0", ok=False),
        Reserved(request_id="big", ok=True),
        Released(request_id="big", replica="d", free_blocks=BLOCKS),
        READY,
        RELEASED,
    ]


def test_in_a_pipeline_tokens_go_out_while_the_first_stage_computes():
    side = Side(stages=2)
    side.front_end.stream.settimeout(LIMIT_S)
    threading.Thread(target=side.driver.run, daemon=True).start()
    steps = []

    def takes_step() -> tuple[str, ...]:
        steps.append(side.own.get(timeout=LIMIT_S))
        return tuple(each.request_id for each in steps[-1].sequences)

    for name in ("r0", "r1"):
        sampling = Sampling(max_tokens=2, ignore_eos=True)
        side.inbox.put(Prefill(request_id=name, prompt=(1,) * 6, sampling=sampling, target=""))
        assert takes_step() == (name,)
        if name == "r0":
            side.inbox.put(StageFree())
    # The first stage still computes the second step when the first one comes back from the last stage.
    side.inbox.put(StepResult(step=steps[0].step, tokens=(7,)))
    (output,) = side.front_end.receive().outputs
    assert (output.request_id, output.token) == ("r0", 7)
    # The next step waits for the first stage, so that it also has what arrives until then.
    side.inbox.put(Prefill(request_id="r2", prompt=(1,) * 6, sampling=Sampling(max_tokens=2), target=""))
    assert side.own.empty()
    side.inbox.put(StageFree())
    assert takes_step() == ("r0", "r2")
    # What is released leaves this worker in order with its steps, and at once for KV caches that arrive.
    side.inbox.put(StepResult(step=steps[2].step, tokens=(8, 9)))
    assert side.own.get(timeout=LIMIT_S) == Release(request_ids=("r0",))
    assert side.silenced == ["r0"]
    assert side.sent == [*steps, Release(request_ids=("r0",))]
    assert [output.token for output in side.front_end.receive().outputs] == [8, 9]
    shared, own = 1, 2
    freed = Released(request_id="r0", replica="d", free_blocks=BLOCKS - shared - own)
    assert side.front_end.receive() == freed


@pytest.mark.parametrize("stages", [1, 2])
def test_an_empty_replica_takes_another_role_after_all_that_came_before(stages):
    side = Side(stages)
    role = configured("another")
    side.driver.reserve(REQUEST)
    acknowledge(side)
    cancel(side)
    side.inbox.put(role)
    assert side.driver.run() is role
    assert side.sent[-2:] == [Release(request_ids=("r0",)), NewRole()]
    if side.own is not None:
        assert [side.own.get_nowait() for _ in range(2)] == side.sent[-2:]


def test_a_replica_with_requests_takes_no_other_role():
    side = Side()
    side.driver.reserve(REQUEST)
    side.inbox.put(configured("another"))
    with pytest.raises(RuntimeError, match="replica d has requests"):
        side.driver.run()


def configured(replica):
    return Configure(
        protocol=PROTOCOL_VERSION,
        worker="d/0",
        replica=replica,
        role="mixed",
        stages=(),
        checkpoint="",
        device="cpu",
        dtype="float32",
        kv_budget_tokens=8,
        block_tokens=4,
        max_batch=2,
        max_prefill_tokens=4,
        max_mixed_tokens=4,
        steps_in_flight=1,
        reuse_prefixes=True,
        host="",
        secret="",
        threads=1,
    )
