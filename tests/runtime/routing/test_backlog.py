"""The sums of a backlog are those of what is in it, whatever came and went."""

import math

from hypothesis import given
from hypothesis import strategies as st

from runtime.routing.backlog import Backlog
from runtime.routing.kv_budget import KvBudget

STEPS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 20), st.floats(1e-3, 1e80), st.floats(1, 1e6)),
        st.tuples(st.integers(0, 20)),
    ),
    max_size=80,
)


@given(STEPS)
def test_sums_stay_right_when_large_work_comes_and_goes(steps):
    backlog, known, most = Backlog(), {}, 0.0
    for request, *added in steps:
        if added and request not in known:
            known[request] = tuple(added)
            backlog.add(request, *added)
        elif not added:
            known.pop(request, None)
            backlog.end(request)
        work = math.fsum(each for each, _ in known.values())
        most = max(most, work) if known else 0.0
        assert len(backlog) == len(known)
        assert math.isclose(backlog.work, work, rel_tol=1e-6)
        assert math.isclose(backlog.tokens, math.fsum(each for _, each in known.values()), rel_tol=1e-6)
    for request in list(known):
        backlog.end(request)
    assert (backlog.work, backlog.tokens) == (0.0, 0.0)


def test_a_released_request_leaves_the_backlog():
    budget = KvBudget(100, 4)
    budget.backlog.add("r", 2.0, 30)
    budget.hold("r", 10)
    assert (budget.backlog.work, len(budget.backlog)) == (2.0, 1)
    budget.release("r")
    budget.release("r")
    assert (budget.backlog.work, len(budget.backlog)) == (0.0, 0)
