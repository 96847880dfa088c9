"""Parameters, stopping criteria and steps of a search, each by itself."""

import dataclasses
import signal
import sys
import threading

import numpy as np
import pytest
from lost_interrupts import press_ctrl_c_in_vain

from cost_model.errors import InputError
from hexgen2.search import stopping
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.params import Params
from hexgen2.search.perturbation import perturbed
from hexgen2.search.problem import Group, Solution, make_problem
from hexgen2.search.steps import HireGpus, MoveGpus, Perturb, TradeGpus
from hexgen2.search.stopping import Stopping, ctrl_c_ends_searches


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Params)])
def test_a_parameter_that_makes_no_sense_is_named(field):
    for wrong in (0, -1, float("nan")):
        with pytest.raises(InputError, match=field):
            Params(**{field: wrong})


def test_counts_are_whole_and_shares_at_most_one():
    for wrong in ({"perturbations": 1.5}, {"close_gap": 1.5}, {"capacity_kept": 2}, {"latency_step": 1.0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Params(**wrong)


def test_one_clock_serves_a_search_and_those_within_it(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    outer = Stopping(time_limit_s=5, _started_s=100.0)
    now[0] = 103.0
    inner = outer.again()
    assert (inner.elapsed_s, inner.time_left_s, inner.out_of_time()) == (3, 2, False)
    now[0] = 105.5
    assert inner.out_of_time() and inner.cut == "time limit" and inner.time_left_s == 0
    assert outer.cut is None and outer.out_of_time()


def test_an_interrupted_search_is_out_of_time():
    limits = Stopping()
    assert not limits.out_of_time() and limits.time_left_s is None
    limits.interrupt()
    assert limits.out_of_time() and limits.cut == "interrupted" and not limits.again().out_of_time()


def test_ctrl_c_ends_a_search_even_if_its_exception_is_lost(monkeypatch):
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: lost.append(about.exc_type))
    limits = Stopping()
    with ctrl_c_ends_searches():
        assert not limits.out_of_time()
        press_ctrl_c_in_vain()
        assert lost == [KeyboardInterrupt] and limits.cut is None
        assert limits.spent(0.5) and limits.cut == "interrupted" and Stopping().out_of_time()
    assert not Stopping().out_of_time() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with ctrl_c_ends_searches():
        assert not Stopping().out_of_time()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert Stopping().out_of_time()


def test_ctrl_c_stays_as_it_is_where_it_is_ignored_and_in_other_threads():
    seen = []

    def handler():
        with ctrl_c_ends_searches():
            seen.append(signal.getsignal(signal.SIGINT))

    other = threading.Thread(target=handler)
    other.start()
    other.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        handler()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.default_int_handler, signal.SIG_IGN]


def test_steps_print_as_the_trace_shows_them():
    assert str(MoveGpus(2, 0, "prefill", "decode")) == "move 2 of node 0: prefill -> decode"
    assert str(HireGpus(4, 1, "decode", new_group=True)) == "hire 4 of node 1 as decode"
    trade = TradeGpus(((0, 1), (2, 3)), 4, 1, "decode", new_group=False)
    assert str(trade) == "trade 1 of node 0 and 3 of node 2 for 4 of node 1 in decode"
    assert str(Perturb(("move", "flip"))) == "kick: move, flip"


def test_a_perturbation_has_at_most_the_steps_that_the_parameters_allow():
    problem = make_problem("hexgen2-case-study", "opt-30b", "HPLD")
    evaluator = Evaluator(problem, Params(perturbation_steps=2))
    start = Solution((Group("prefill", ((0, 1),)), Group("decode", ((1, 1),))))
    for seed in range(20):
        step, _ = perturbed(np.random.default_rng(seed), start, evaluator)
        assert isinstance(step, Perturb) and len(step.kinds) <= 2
