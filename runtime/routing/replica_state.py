"""The states of a replica, from the start of its workers to its loss or replacement.

    starting --serve--> serving --leave alone--> outgoing --retire--> leaving
                           |                        |                    |
                         fail                fail for good        fail for good
                           v                        v                    |
    lost <--give up-- restarting <--> away        gone <-----------------+

`away` waits for its machine, `on hold` for the result of a search without the replica. A restart that works
leads back to `serving`. A replica of an old placement is forgotten once the new one serves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from types import MappingProxyType

from runtime.routing.transitions import Transitions


class ReplicaState(Enum):
    """What a replica is doing; the value is the word for messages."""

    STARTING = "starting"  # part of a new placement; its workers are on their way
    SERVING = "serving"
    OUTGOING = "outgoing"  # serves, but the next placement lacks it: if it dies, it is not restarted
    LEAVING = "leaving"  # takes no new requests and finishes those that it has, if it has not ended already
    RESTARTING = "restarting"  # lost, and being started again
    AWAY = "away"  # lost with its machine; started again when that is back
    ON_HOLD = "on hold"  # lost; not restarted while a placement without it is searched
    LOST = "lost"  # lost for good
    GONE = "gone"  # lost while outgoing or leaving: the next placement needs no replacement for it

    @property
    def takes_requests(self) -> bool:
        """Whether requests may begin on it."""
        return self in (ReplicaState.SERVING, ReplicaState.OUTGOING)

    @property
    def is_expected(self) -> bool:
        """Whether requests may wait for it to serve."""
        return self in _EXPECTED

    @property
    def is_lost(self) -> bool:
        """Whether its workers have failed, or never started."""
        return self in _LOST


_EXPECTED = {ReplicaState.STARTING, ReplicaState.RESTARTING, ReplicaState.AWAY, ReplicaState.ON_HOLD}
_LOST = {
    *(ReplicaState.RESTARTING, ReplicaState.AWAY, ReplicaState.ON_HOLD),
    *(ReplicaState.LOST, ReplicaState.GONE),
}


class ReplicaEvent(Enum):
    """What happens to a replica; the value is the word for messages."""

    SERVE = "serve"  # its workers have started
    FAIL = "fail"  # a worker failed, and the supervisor restarts the replica
    FAIL_FOR_GOOD = "fail for good"  # a worker failed or did not start, and nobody restarts the replica
    MACHINE_GONE = "machine gone"
    MACHINE_BACK = "machine back"
    GIVE_UP = "give up"  # it was restarted too often
    LEAVE_ALONE = "leave alone"  # the supervisor does nothing for it until told to resume
    RESUME = "resume"
    RETIRE = "retire"


def _table() -> dict[tuple[ReplicaState, ReplicaEvent], ReplicaState]:
    s, e = ReplicaState, ReplicaEvent
    return {
        (s.STARTING, e.SERVE): s.SERVING,
        (s.STARTING, e.FAIL_FOR_GOOD): s.LOST,
        (s.SERVING, e.FAIL): s.RESTARTING,
        (s.SERVING, e.FAIL_FOR_GOOD): s.LOST,
        (s.SERVING, e.LEAVE_ALONE): s.OUTGOING,
        (s.SERVING, e.RETIRE): s.LEAVING,
        (s.OUTGOING, e.FAIL_FOR_GOOD): s.GONE,
        (s.OUTGOING, e.LEAVE_ALONE): s.OUTGOING,
        (s.OUTGOING, e.RETIRE): s.LEAVING,
        (s.LEAVING, e.FAIL_FOR_GOOD): s.GONE,
        (s.LEAVING, e.LEAVE_ALONE): s.LEAVING,
        (s.LEAVING, e.RETIRE): s.LEAVING,
        (s.RESTARTING, e.SERVE): s.SERVING,
        (s.RESTARTING, e.MACHINE_GONE): s.AWAY,
        (s.RESTARTING, e.GIVE_UP): s.LOST,
        (s.RESTARTING, e.LEAVE_ALONE): s.ON_HOLD,
        (s.AWAY, e.MACHINE_BACK): s.RESTARTING,
        (s.AWAY, e.LEAVE_ALONE): s.ON_HOLD,
        (s.ON_HOLD, e.LEAVE_ALONE): s.ON_HOLD,
        (s.ON_HOLD, e.RESUME): s.RESTARTING,
        (s.LOST, e.FAIL_FOR_GOOD): s.LOST,
        (s.LOST, e.LEAVE_ALONE): s.LOST,
        (s.GONE, e.LEAVE_ALONE): s.GONE,
        (s.GONE, e.RETIRE): s.GONE,
    }


TRANSITIONS: Transitions[ReplicaState, ReplicaEvent] = Transitions("replica", _table())


class ReplicaStates:
    """The state of each replica by its id. One that nothing was said of serves.

    The front end has one of these: admission, coordinator, supervisor and re-planner all ask it.
    """

    def __init__(self) -> None:
        self._states: dict[str, ReplicaState] = {}
        self._reasons: dict[str, str] = {}

    def __getitem__(self, replica_id: str) -> ReplicaState:
        return self._states.get(replica_id, ReplicaState.SERVING)

    def on(self, event: ReplicaEvent, replica_id: str, reason: str = "") -> ReplicaState:
        """Change a replica's state by an event.

        Parameters
        ----------
        reason : why the replica is lost, for an event by which it is

        Returns
        -------
        the new state
        """
        state = self._states[replica_id] = TRANSITIONS.next(self[replica_id], event, replica_id)
        if not state.is_lost:
            self._reasons.pop(replica_id, None)
        elif reason:
            self._reasons[replica_id] = reason
        return state

    def begin_placement(self, starting: Iterable[str], forgotten: Iterable[str]) -> None:
        """Begin with the replicas of another placement.

        Parameters
        ----------
        starting : those that do not serve yet
        forgotten : those that were lost and are not part of it
        """
        left = [name for name, state in self._states.items() if state is ReplicaState.LEAVING]
        for name in (*forgotten, *left):
            self._states.pop(name, None)
            self._reasons.pop(name, None)
        for name in starting:
            self._states[name] = ReplicaState.STARTING

    @property
    def lost(self) -> Mapping[str, str]:
        """Lost replicas, with the reason."""
        return MappingProxyType(self._reasons)

    @property
    def absent(self) -> frozenset[str]:
        """Replicas that no request may begin on."""
        return frozenset(name for name, state in self._states.items() if not state.takes_requests)

    @property
    def unexpected(self) -> frozenset[str]:
        """Those of the absent that no request may wait for."""
        return frozenset(name for name in self.absent if not self._states[name].is_expected)

    def which_are(self, *states: ReplicaState) -> Collection[str]:
        """Replicas in one of some states."""
        return {name for name, state in self._states.items() if state in states}
