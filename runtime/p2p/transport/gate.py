"""Decides who may connect, says why a connection was refused, and limits how often that is logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from cost_model.printable import one_line

log = logging.getLogger(__name__)

MAX_STRANGERS = 1000
LOG_EVERY_S = 600.0
QUIET_S = 10.0  # after a pause this long an event counts as a new attempt and is logged again
LINES_A_PERIOD = 10  # per stranger and cause, within LOG_EVERY_S


class Cause(StrEnum):
    """Why a connection was refused."""

    NETWORK_KEY = "network key"
    NOT_ALLOWED = "not allowed"
    OTHER_PEER = "another peer"
    VERSION = "version"
    NO_NODE = "no node"
    UNCLEAR = "unclear"


class Refused(Exception):
    """One of the two ends refuses the connection.

    Parameters
    ----------
    problem : what is wrong; in its text "it" is the other end and "this node" is this end
    remedy : what an operator can do about it

    Attributes
    ----------
    peer_id : the other end's peer id if it proved one, else ""
    by_them : whether the other end refused, rather than this one
    """

    peer_id, by_them = "", False

    def __init__(self, cause: Cause, problem: str, remedy: str = "") -> None:
        self.cause, self.problem, self.remedy = cause, problem, remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)

    @property
    def final(self) -> bool:
        """Whether retrying is pointless until an operator changes something, as far as this end can tell."""
        return self.cause is not Cause.UNCLEAR


def causes(error: BaseException | None) -> list[BaseException]:
    """An exception and the chain of its causes, the original cause last."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def refusal_in(error: BaseException) -> Refused | None:
    """The refusal among the causes of an exception; None if there is none."""
    return next((each for each in causes(error) if isinstance(each, Refused)), None)


def error_line(error: BaseException) -> str:
    """The type and message of an exception, or of the first one in a group, as one printable line."""
    error = first_of(error)
    return one_line(f"{type(error).__name__}: {error}")[:300]


def first_of(error: BaseException) -> BaseException:
    """The exception itself, or the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass
class _Subject:
    times: int = 0
    came_at: float = 0.0
    logged_at: float = 0.0
    period_at: float = 0.0
    lines: int = 0


class Notices:
    """Decides which of many similar events are logged, so that a port scanner fills neither log nor memory.

    An event (who, what) is logged the first time, when it recurs after a pause of QUIET_S, and every
    `every_s` while it recurs, but at most LINES_A_PERIOD times within LOG_EVERY_S. Beyond MAX_STRANGERS
    events, all new ones count as one.
    """

    def __init__(self, every_s: float = LOG_EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._now = every_s, now
        self._subjects: dict[tuple[str, str], _Subject] = {}

    def times(self, who: str, what: str) -> int:
        """Count an event; returns how often it has occurred if it is to be logged now, else 0."""
        key = (who, what)
        if key not in self._subjects and len(self._subjects) >= MAX_STRANGERS:
            key = ("others", what)
        now = self._now()
        subject = self._subjects.setdefault(key, _Subject())
        first, quiet = subject.times == 0, now - subject.came_at >= QUIET_S
        subject.times, subject.came_at = subject.times + 1, now
        if first or now - subject.period_at >= LOG_EVERY_S:
            subject.period_at, subject.lines = now, 0
        due = first or quiet or now - subject.logged_at >= self._every_s
        if not due or subject.lines >= LINES_A_PERIOD:
            return 0
        subject.logged_at, subject.lines = now, subject.lines + 1
        return subject.times


class Gate:
    """Decides who may connect: the peer ids of a list, or everybody who completes the handshake.

    Parameters
    ----------
    allowed : peer ids that may connect; None: everybody
    protocol : version of the messages on this node's channels; both ends must have the same

    Attributes
    ----------
    refused : how often each stranger was refused, by peer id, or by IP address if it proved no id
    """

    def __init__(self, allowed: Collection[str] | None, protocol: str = "") -> None:
        self.protocol = protocol
        self._allowed = None if allowed is None else frozenset(allowed)
        self._notices = Notices()
        self.refused: dict[str, int] = {}

    def allows(self, peer_id: str) -> bool:
        """Whether this peer may connect."""
        return self._allowed is None or peer_id in self._allowed

    def admits(self, peer_id: str) -> bool:
        """Whether this peer may connect; if not, counts and logs the refusal."""
        if not self.allows(peer_id):
            self.refuse("", not_allowed_here(peer_id))
        return self.allows(peer_id)

    def refuse(self, host: str, refusal: Refused) -> None:
        """Count the refusal of a connection from a host, and log it, though not every time."""
        who = refusal.peer_id or host
        if not refusal.by_them:
            counted = who if who in self.refused or len(self.refused) < MAX_STRANGERS else "others"
            self.refused[counted] = self.refused.get(counted, 0) + 1
        if times := self._notices.times(who, refusal.cause):
            peer = f"peer {refusal.peer_id}" + (f" at {host}" if host else "")
            subject = peer if refusal.peer_id else f"a connection from {host}"
            often = "" if times == 1 else f" ({times} times so far)"
            verb = "no connection with" if refusal.by_them and refusal.peer_id else "refused"
            log.warning("%s %s: %s%s", verb, subject, refusal, often)

    def note(self, who: str, what: str, line: str) -> None:
        """Log a line about a peer that is not refused, though not every time."""
        if self._notices.times(who, what):
            log.warning("%s", line)


def not_allowed_here(peer_id: str) -> Refused:
    """The refusal of a peer that is not on this node's --allow list."""
    problem = "it is not on this node's --allow list"
    refused = Refused(Cause.NOT_ALLOWED, problem, f"to admit it, start this node with --allow {peer_id}")
    refused.peer_id = peer_id
    return refused


def not_allowed_there(own_id: str) -> Refused:
    """The refusal by a peer that does not have this node on its --allow list."""
    problem = f"this node ({own_id}) is not on its --allow list"
    refused = Refused(Cause.NOT_ALLOWED, problem, f"to be admitted, start that one with --allow {own_id}")
    refused.by_them = True
    return refused
