"""How a search divides its time limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hexgen2.strategies.hexgen2 import BOUNDED, _Hopeless, _later


def test_columns_are_given_up_by_their_pace_after_the_first_batch():
    """The first batch takes half of the time, and the others are quick; then they are not."""
    clock = SimpleNamespace(spent_share=0.3, spent=lambda share: True)
    hopeless = _Hopeless(clock, 0.82)
    assert not hopeless(0.05)
    clock.spent_share = 0.35
    assert not hopeless(0.25)  # 0.05 for a fifth: over at 0.54.
    clock.spent_share = 0.6
    assert hopeless(0.3)


def test_columns_are_not_given_up_early_or_while_nothing_is_known():
    clock = SimpleNamespace(spent_share=0.1, spent=lambda share: True)
    hopeless = _Hopeless(clock, 0.4)
    assert not hopeless(0.01)
    clock.spent_share = BOUNDED - 0.01
    assert not hopeless(0.02)
    clock.spent_share = BOUNDED + 0.01
    assert not _Hopeless(clock, 0.4)(0.5) and hopeless(0.02)


@pytest.mark.parametrize("share", [0.4, 0.5, 0.7])
def test_shares_are_as_said_unless_listing_took_longer(share):
    assert _later(BOUNDED, share) == pytest.approx(share)
    late = _later(0.6, share)
    assert share < late < 1 and (late - 0.6) / 0.4 == pytest.approx((share - BOUNDED) / (1 - BOUNDED))
