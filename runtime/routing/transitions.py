"""A state machine as a table: (state, event) -> next state."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

STRICT_VARIABLE = "HEXGEN2_STRICT"
"""Environment variable that the tests set: a transition that a table lacks raises an error."""

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


class IllegalTransition(RuntimeError):
    """An event that must not happen in a state: a fault of ours."""


class Transitions(Generic[State, Event]):
    """The allowed transitions of one kind of thing.

    Parameters
    ----------
    kind : what has these states, for messages
    table : from state and event to the next state; what it lacks must not happen
    """

    def __init__(self, kind: str, table: Mapping[tuple[State, Event], State]) -> None:
        self.kind, self.table = kind, table

    def next(self, state: State, event: Event, name: str) -> State:
        """The state after an event.

        An event that the table lacks raises IllegalTransition where STRICT_VARIABLE is set. Elsewhere the
        state stays as it is and the log has an error with the stack, so that a serving fleet goes on.
        """
        if (following := self.table.get((state, event))) is not None:
            return following
        problem = f"{self.kind} {name} is {state.value}, where {event.value} must not happen"
        if os.environ.get(STRICT_VARIABLE):
            raise IllegalTransition(problem)
        log.error(problem, stack_info=True)
        return state
