"""The measured rate of starts, against rates that are known."""

from runtime.routing.wait_estimate import STARTS_NEEDED, Pace


def paced(interval_s, starts=20):
    pace = Pace()
    pace.waiting(True, 100.0)
    for number in range(starts):
        pace.started(100.0 + (number + 1) * interval_s)
    return pace, 100.0 + starts * interval_s


def test_a_steady_rate_gives_the_wait():
    pace, now_s = paced(0.5)
    assert pace.wait_s(10, now_s) == 5.0
    assert pace.retry_after_s(10, now_s) == 5
    assert pace.wait_s(0, now_s) == 0


def test_nothing_is_claimed_before_there_is_something_to_go_by():
    pace, now_s = paced(0.5, starts=STARTS_NEEDED - 1)
    assert pace.wait_s(10, now_s) is None
    assert pace.retry_after_s(10, now_s) == 1


def test_a_quiet_hour_says_nothing_about_the_rate():
    pace, now_s = paced(0.5)
    pace.waiting(False, now_s)
    for _ in range(5):
        pace.started(now_s + 1800)
    assert pace.wait_s(10, now_s + 3600) == 5.0
    pace.waiting(True, now_s + 3600)
    pace.started(now_s + 3600.5)
    assert pace.wait_s(10, now_s + 3600.5) == 5.0


def test_a_stall_makes_the_wait_longer_at_once():
    pace, now_s = paced(0.5)
    assert pace.wait_s(10, now_s + 10) == 10.0


def test_what_is_told_is_bounded():
    pace, now_s = paced(60.0)
    assert pace.retry_after_s(100, now_s) == 120
