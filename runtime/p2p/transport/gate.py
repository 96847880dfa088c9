"""Why two processes do not become peers, in words for both operators, and how often it is said."""

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
QUIET_S = 10.0  # whoever comes back after this long is a new attempt, and is logged again
LINES_A_PERIOD = 10  # about one stranger and one cause, within LOG_EVERY_S


class Cause(StrEnum):
    """Why a connection cannot stand."""

    NETWORK_KEY = "network key"
    NOT_ALLOWED = "not allowed"
    OTHER_PEER = "another peer"
    VERSION = "version"
    NO_NODE = "no node"
    UNCLEAR = "unclear"


class Refused(Exception):
    """One end refuses the connection.

    Parameters
    ----------
    problem : what is wrong, where "it" is the other end and "this node" this one
    remedy : what an operator can do about it

    Attributes
    ----------
    peer_id : who the other end is, if that was proved; else ""
    by_them : the other end refuses this one
    """

    peer_id, by_them = "", False

    def __init__(self, cause: Cause, problem: str, remedy: str = "") -> None:
        self.cause, self.problem, self.remedy = cause, problem, remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)

    @property
    def final(self) -> bool:
        """Whether it stays like this until an operator changes something, as far as can be told."""
        return self.cause is not Cause.UNCLEAR


def causes(error: BaseException | None) -> list[BaseException]:
    """An exception and what led to it, the first cause last."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def refusal_in(error: BaseException) -> Refused | None:
    """The refusal that led to an exception, if one did."""
    return next((each for each in causes(error) if isinstance(each, Refused)), None)


def error_line(error: BaseException) -> str:
    """What an exception, or the first of a group, says, in one printable line, with its kind."""
    error = first_of(error)
    return one_line(f"{type(error).__name__}: {error}")[:300]


def first_of(error: BaseException) -> BaseException:
    """The exception itself, or the first one inside a group."""
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
    """Decides which of many equal events get a line: a scanner fills neither log nor memory.

    A subject gets one the first time, when it comes back after QUIET_S, and every `every_s` if it keeps
    coming; never more than LINES_A_PERIOD within LOG_EVERY_S. Subjects beyond MAX_STRANGERS share one.
    """

    def __init__(self, every_s: float = LOG_EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._now = every_s, now
        self._subjects: dict[tuple[str, str], _Subject] = {}

    def times(self, who: str, what: str) -> int:
        """Count an event; how often it has come so far if it gets a line, else 0."""
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
    allowed : peer ids; None: everybody
    protocol : version of what this node sends through its channels; both ends must have the same

    Attributes
    ----------
    refused : how often each stranger was refused, by peer id, or by address if it proved none
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
        """Whether this peer may connect; a stranger is logged and counted."""
        if not self.allows(peer_id):
            self.refuse("", not_allowed_here(peer_id))
        return self.allows(peer_id)

    def refuse(self, host: str, refusal: Refused) -> None:
        """Count a stranger that came from a host, and log now and then why nothing came of it."""
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
        """Log something about a peer that does not keep it out, now and then."""
        if self._notices.times(who, what):
            log.warning("%s", line)


def not_allowed_here(peer_id: str) -> Refused:
    """The other end is not on this node's list."""
    problem = "it is not on this node's --allow list"
    refused = Refused(Cause.NOT_ALLOWED, problem, f"to let it in, start this node with --allow {peer_id}")
    refused.peer_id = peer_id
    return refused


def not_allowed_there(own_id: str) -> Refused:
    """This node is not on the other end's list."""
    problem = f"this node ({own_id}) is not on its --allow list"
    refused = Refused(Cause.NOT_ALLOWED, problem, f"to be let in, start that one with --allow {own_id}")
    refused.by_them = True
    return refused
