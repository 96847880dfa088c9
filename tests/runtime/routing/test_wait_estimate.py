"""The measured rate of starts, compared with known rates."""

from runtime.routing.wait_estimate import STARTS_NEEDED, WaitEstimate


def paced(interval_s, starts=20):
    estimate = WaitEstimate()
    estimate.waiting(True, 100.0)
    for number in range(starts):
        estimate.started(100.0 + (number + 1) * interval_s)
    return estimate, 100.0 + starts * interval_s


def test_a_steady_rate_gives_the_wait():
    estimate, now_s = paced(0.5)
    assert estimate.wait_s(10, now_s) == 5.0
    assert estimate.retry_after_s(10, now_s) == 5
    assert estimate.wait_s(0, now_s) == 0


def test_nothing_is_claimed_before_there_is_something_to_go_by():
    estimate, now_s = paced(0.5, starts=STARTS_NEEDED - 1)
    assert estimate.wait_s(10, now_s) is None
    assert estimate.retry_after_s(10, now_s) == 1


def test_a_quiet_hour_says_nothing_about_the_rate():
    estimate, now_s = paced(0.5)
    estimate.waiting(False, now_s)
    for _ in range(5):
        estimate.started(now_s + 1800)
    assert estimate.wait_s(10, now_s + 3600) == 5.0
    estimate.waiting(True, now_s + 3600)
    estimate.started(now_s + 3600.5)
    assert estimate.wait_s(10, now_s + 3600.5) == 5.0


def test_a_stall_makes_the_wait_longer_at_once():
    estimate, now_s = paced(0.5)
    assert estimate.wait_s(10, now_s + 10) == 10.0


def test_what_is_told_is_bounded():
    estimate, now_s = paced(60.0)
    assert estimate.retry_after_s(100, now_s) == 120
