"""The states of a request as a table: every pair of state and event is allowed or refused."""

import pytest

from runtime.frontend.request_state import TRANSITIONS, RequestEvent, RequestState
from runtime.routing.transitions import IllegalTransition

COLUMNS = "reserve prefill decode wait_again end"
ROWS = {
    "waiting": "reserving prefilling - - ended",
    "reserving": "- prefilling - waiting ended",
    "prefilling": "- - decoding waiting ended",
    "decoding": "- - - waiting ended",
    "ended": "- - - - -",
}


@pytest.mark.parametrize("state", RequestState)
def test_each_event_leads_where_the_table_says_or_is_refused(state):
    assert list(ROWS) == [each.value for each in RequestState]
    for name, expected in zip(COLUMNS.split(), ROWS[state.value].split(), strict=True):
        event = RequestEvent[name.upper()]
        if expected == "-":
            with pytest.raises(IllegalTransition, match=f"request r1 is {state.value}"):
                TRANSITIONS.next(state, event, "r1")
        else:
            assert TRANSITIONS.next(state, event, "r1") is RequestState(expected)
