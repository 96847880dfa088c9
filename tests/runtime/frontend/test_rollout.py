"""Waves: each replica's turn comes once, none starts on GPUs in use, and some replica keeps serving if
possible."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.frontend.rollout import waves

ROLES = st.sampled_from(["prefill", "prefill", "decode", "decode", "colocated", "mixed"])


def serve(names, roles):
    have = {roles[name] for name in names}
    return "colocated" in have or "mixed" in have or {"prefill", "decode"} <= have


@st.composite
def changes(draw):
    names = {
        kind: [f"{kind}{k}" for k in range(draw(st.integers(0, 5)))] for kind in ("stays", "leaves", "comes")
    }
    roles = {name: draw(ROLES) for own in names.values() for name in own}
    some = st.sets(st.sampled_from(names["leaves"])) if names["leaves"] else st.just(set())
    return names["stays"], names["leaves"], {name: draw(some) for name in names["comes"]}, roles


@given(changes())
def test_everyone_has_a_turn_and_somebody_serves_whenever_that_is_possible(change):
    staying, leaving, blockers, roles = change
    standing, started = {*staying, *leaving}, []
    found = waves(staying, leaving, blockers, roles)
    for number, wave in enumerate(found):
        before, standing = standing, standing - wave.leave
        assert wave.leave <= {*leaving} & before
        assert not any(blockers[name] & standing for name in wave.start)
        if not serve(standing, roles) and number < len(found) - 1:
            left = [name for name in blockers if name not in started]
            assert not any(serve(before - blockers[name], roles) for name in left)
        standing |= wave.start
        started += wave.start
    assert sorted(started) == sorted(blockers)
    assert standing == {*staying, *blockers}


def test_a_fleet_that_changes_whole_does_so_in_two_halves():
    old, new = ["p0", "p1", "d0", "d1"], {"P0": {"p0"}, "P1": {"p1"}, "D0": {"d0"}, "D1": {"d1"}}
    roles = {name: "prefill" if name.lower().startswith("p") else "decode" for name in (*old, *new)}
    first, second = waves([], old, new, roles)
    assert sorted(roles[name] for name in first.leave) == ["decode", "prefill"]
    assert first.leave | second.leave == set(old) and first.start | second.start == set(new)
