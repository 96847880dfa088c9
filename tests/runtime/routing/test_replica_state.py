"""The states of a replica as a table: every pair of state and event is allowed or refused."""

import logging
from itertools import product

import pytest

from runtime.routing.replica_state import TRANSITIONS, ReplicaEvent, ReplicaState, ReplicaStates
from runtime.routing.transitions import STRICT_VARIABLE, IllegalTransition

COLUMNS = "serve fail fail_for_good machine_gone machine_back give_up leave_alone resume retire"
TABLE = """
starting     serving  -           lost  -     -           -     -         -           -
serving      -        restarting  lost  -     -           -     outgoing  -           leaving
outgoing     -        -           gone  -     -           -     outgoing  -           leaving
leaving      -        -           gone  -     -           -     leaving   -           leaving
restarting   serving  -           -     away  -           lost  on_hold   -           -
away         -        -           -     -     restarting  -     on_hold   -           -
on_hold      -        -           -     -     -           -     on_hold   restarting  -
lost         -        -           lost  -     -           -     lost      -           -
gone         -        -           -     -     -           -     gone      -           gone
"""
ROWS = {row.split()[0]: row.split()[1:] for row in TABLE.strip().splitlines()}


@pytest.mark.parametrize("state", ReplicaState)
def test_each_event_leads_where_the_table_says_or_is_refused(state):
    assert list(ROWS) == [each.name.lower() for each in ReplicaState]
    for name, expected in zip(COLUMNS.split(), ROWS[state.name.lower()], strict=True):
        event = ReplicaEvent[name.upper()]
        if expected == "-":
            with pytest.raises(IllegalTransition, match=f"replica p0 is {state.value}"):
                TRANSITIONS.next(state, event, "p0")
        else:
            assert TRANSITIONS.next(state, event, "p0") is ReplicaState[expected.upper()]


def test_a_serving_fleet_outlives_an_illegal_transition_and_logs_it(monkeypatch, caplog):
    monkeypatch.delenv(STRICT_VARIABLE)
    refused = [pair for pair in product(ReplicaState, ReplicaEvent) if pair not in TRANSITIONS.table]
    for state, event in refused:
        assert TRANSITIONS.next(state, event, "p0") is state
    assert len(caplog.records) == len(refused) and {r.levelno for r in caplog.records} == {logging.ERROR}


def test_each_state_either_takes_requests_or_is_waited_for_or_neither():
    takes = {state.value for state in ReplicaState if state.takes_requests}
    expected = {state.value for state in ReplicaState if state.is_expected}
    lost = {state.value for state in ReplicaState if state.is_lost}
    assert takes == {"serving", "outgoing"} and not takes & (expected | lost)
    assert expected == {"starting", "restarting", "away", "on hold"}
    assert lost == {"restarting", "away", "on hold", "lost", "gone"}


def test_who_is_lost_and_why_and_whom_requests_may_wait_for():
    states = ReplicaStates()
    assert states["p0"] is ReplicaState.SERVING and not states.absent
    states.on(ReplicaEvent.FAIL, "p0", "its worker ended")
    states.on(ReplicaEvent.FAIL_FOR_GOOD, "d0", "it was killed")
    assert dict(states.lost) == {"p0": "its worker ended", "d0": "it was killed"}
    assert states.absent == {"p0", "d0"} and states.unexpected == {"d0"}
    states.on(ReplicaEvent.SERVE, "p0")
    assert dict(states.lost) == {"d0": "it was killed"} and states.absent == {"d0"}


def test_another_placement_forgets_who_has_left_and_expects_who_comes():
    states = ReplicaStates()
    states.on(ReplicaEvent.FAIL_FOR_GOOD, "d0", "it was killed")
    states.on(ReplicaEvent.RETIRE, "d1")
    states.begin_placement(starting=["d0"], forgotten=["d0"])
    assert states["d1"] is ReplicaState.SERVING and not states.lost
    assert states.which_are(ReplicaState.STARTING) == {"d0"} and not states.unexpected
