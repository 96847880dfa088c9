"""Pressure begins when most requests find others waiting, and ends when hardly any does."""

from runtime.routing.pressure import HIGH, LOW, WINDOW, Pressure


def test_pressure_begins_after_many_waiting_requests_and_ends_long_after_the_last():
    pressure = Pressure()
    for _ in range(WINDOW // 4):
        pressure.arrived(True)
    assert not pressure.high and 0 < pressure.share < HIGH
    for _ in range(WINDOW):
        pressure.arrived(True)
    assert pressure.high and pressure.share > HIGH
    for _ in range(WINDOW // 2):
        pressure.arrived(False)
    assert pressure.high and LOW < pressure.share < HIGH
    for _ in range(WINDOW):
        pressure.arrived(False)
    assert not pressure.high


def test_a_share_between_the_levels_changes_nothing():
    calm, pressed = Pressure(), Pressure()
    for _ in range(2 * WINDOW):
        pressed.arrived(True)
    for k in range(20 * WINDOW):
        for pressure in (calm, pressed):
            pressure.arrived(k % 10 < 3)
    assert not calm.high and pressed.high
