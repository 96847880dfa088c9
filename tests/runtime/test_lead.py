"""A lead's answers where a follower has no room: each reservation is answered, and freed, once."""

import queue
import socket
from types import SimpleNamespace

import pytest

from runtime.engine.lead import Lead
from runtime.messages import Cancel, Expect, Release, Released, Reserved
from runtime.transport import Connection

ROOM = 100
REQUEST = Expect(request_id="r0", prompt_tokens=3, capacity_tokens=60)
REFUSED, RELEASED = Reserved(request_id="r0", ok=False), Released(request_id="r0", replica="d")


class Side:
    """A lead with one follower, whose threads are played by the test."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.front_end, self.told, self.inbox = Connection(ours), [], queue.SimpleQueue()
        config = SimpleNamespace(
            replica="d",
            worker="d/0",
            kv_budget_tokens=ROOM,
            max_batch=4,
            max_prefill_tokens=64,
            stages=("one",),
        )
        member = SimpleNamespace(
            config=config,
            stage=SimpleNamespace(spec=SimpleNamespace(position_limit=None, vocab=50)),
            expect=lambda _: True,
            release=lambda _: None,
        )
        follower = SimpleNamespace(send=self.told.append)
        self.lead = Lead(member, Connection(theirs), {"d/1": follower}, self.inbox)

    def handle_inbox(self):
        while not self.inbox.empty():
            self.lead._handle(self.inbox.get())

    def answers(self):
        """What the front end was sent; a further reservation tells that nothing else is under way."""
        self.lead.reserve(Expect(request_id="last", prompt_tokens=1, capacity_tokens=ROOM))
        self.lead.acknowledge("d/1", "last", True)
        found = []
        while (message := self.front_end.receive()) != Reserved(request_id="last", ok=True):
            found.append(message)
        return found


def refuse(side):
    side.lead.acknowledge("d/1", "r0", False)


def cancel(side):
    side.inbox.put(Cancel(request_id="r0"))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([refuse], [REFUSED]),
        ([refuse, cancel], [REFUSED]),
        ([cancel, refuse], [RELEASED]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_reservation_without_room_is_answered_once_and_gives_its_room_back(events, expected, at_once):
    side = Side()
    side.lead.reserve(REQUEST)
    for event in events:
        event(side)
        if not at_once:
            side.handle_inbox()
    side.handle_inbox()
    assert side.told == [REQUEST, Release(request_ids=("r0",))]
    assert side.answers() == expected
