"""Work in another process gives what it would give here, and leaves nothing behind."""

import multiprocessing
import os
import signal
import time

import pytest

import hexgen2
from cost_model.errors import InfeasibleError
from hexgen2.search import background
from hexgen2.search.background import Ahead, Background, free_cores, gather

LIMIT_S = 60.0


@pytest.fixture
def cores(monkeypatch):
    """Two free cores, whatever this machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert free_cores() == 2


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert free_cores() == 0


def gone(pid: int) -> bool:
    """Whether a process ends within the limit."""
    deadline = time.monotonic() + LIMIT_S
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    return not os.path.exists(f"/proc/{pid}")


def test_work_runs_in_another_process_while_this_one_goes_on(cores):
    both = [Background(lambda report: os.getpid()) for _ in range(2)]
    assert free_cores() == 0
    here = Background(lambda report: os.getpid())
    pids = {each.result() for each in both}
    assert len(pids) == 2 and os.getpid() not in pids and all(each.elsewhere for each in both)
    assert not here.elsewhere and here.result() == os.getpid()
    assert free_cores() == 2 and all(map(gone, pids))


def test_without_a_free_core_work_is_done_when_it_is_asked_for(one_core):
    done = []
    work = Background(lambda report: done.append(report("so far")))
    assert not done and not work.elsewhere
    work.result()
    assert done == [None] and work.latest() == "so far"


def test_no_process_is_forked_from_one_that_works_in_the_background(cores):
    assert Background(lambda report: free_cores()).result() == 0


def test_workers_of_a_pool_fork_nothing(cores):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(free_cores) == 0


def test_waiting_ends_when_it_is_time_to_stop(cores):
    work = Background(lambda report: time.sleep(LIMIT_S))
    looks = iter((False, True))
    work.wait(lambda: next(looks))
    assert not work.done and free_cores() == 2


def test_a_result_that_came_before_it_was_time_to_stop_counts(cores):
    work = Background(lambda report: "found")
    work._process.join(LIMIT_S)
    work.wait(lambda: True)
    assert work.done and work.result() == "found" and free_cores() == 2


def test_gathering_does_here_what_no_core_is_free_for(cores):
    works = [Background(lambda report: os.getpid()) for _ in range(4)]
    gather(works)
    pids = [work.result() for work in works]
    assert all(work.done for work in works) and pids.count(os.getpid()) >= 1 and len(set(pids)) >= 2


def test_errors_of_the_work_are_raised_here(cores, monkeypatch):
    def fails(report):
        raise InfeasibleError("no GPU")

    for expected in (True, False):
        work = Background(fails)
        assert work.elsewhere is expected
        with pytest.raises(InfeasibleError, match="no GPU"):
            work.result()
        monkeypatch.setattr(background, "free_cores", lambda: 0)


def test_a_result_that_cannot_be_sent_is_an_error_and_no_hang(cores):
    with pytest.raises(RuntimeError, match="cannot be sent"):
        Background(lambda report: lambda: None).result()


def test_a_process_that_is_killed_is_an_error(cores):
    work = Background(lambda report: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match="died"):
        work.result()
    assert free_cores() == 2


@pytest.mark.parametrize("fails", ["raises", "dies"])
def test_who_looks_again_and_again_is_told_of_an_error(cores, fails):
    def work(report):
        if fails == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise InfeasibleError("no GPU")

    begun, deadline = Background(work), time.monotonic() + LIMIT_S

    def look():
        while time.monotonic() < deadline:
            begun.latest()

    expected = (
        pytest.raises(RuntimeError, match="died") if fails == "dies" else pytest.raises(InfeasibleError)
    )
    with expected:
        look()
    begun.cancel()
    with expected:
        begun.result()
    assert free_cores() == 2


def test_cancelled_work_ends_and_what_it_reported_is_kept(cores):
    def endless(report):
        report(os.getpid())
        time.sleep(LIMIT_S)

    work = Background(endless)
    deadline = time.monotonic() + LIMIT_S
    while (pid := work.latest()) is None:
        assert time.monotonic() < deadline
    work.cancel()
    work.cancel()
    assert gone(pid) and work.latest() == pid and free_cores() == 2


def test_works_begin_ahead_and_may_be_skipped(cores):
    with Ahead([os.getpid] * 5) as pids:
        first, third = pids.result(0), pids.result(2)
        assert first == os.getpid() != third
    assert free_cores() == 2


def test_works_that_take_too_long_elsewhere_are_left_to_themselves_and_done_here(cores):
    """They look at the clock themselves, but those elsewhere know nothing of Ctrl-C."""
    here, stopped = os.getpid(), []

    def work():
        while os.getpid() != here and not stopped:
            time.sleep(0.01)
        return os.getpid()

    with Ahead([os.getpid, work], lambda: bool(stopped)) as works:
        assert works.result(0) == here
        stopped.append(True)  # The other process has its own list.
        assert works.result(1) == here
    assert free_cores() == 2


def test_the_first_report_is_waited_for_but_not_the_result(cores):
    def endless(report):
        report("first")
        time.sleep(LIMIT_S)

    work = Background(endless)
    assert work.first_report() == "first" and not work.done
    work.cancel()
    assert work.first_report() == "first"
    silent = Background(lambda report: 7)
    assert silent.first_report() is None and silent.result() == 7
    assert free_cores() == 2


@pytest.mark.parametrize("cluster", ("hexgen2-setting-5", "hexgen2-homogeneous"))
def test_a_search_has_the_same_answer_on_one_core_and_on_several(cluster, monkeypatch):
    found = []
    for count in (1, 2, 4):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        placement = hexgen2.search(cluster=cluster, model="llama-2-70b", workload="LPLD", seed=count > 9)
        found.append(
            placement.model_copy(update={"search": placement.search.model_copy(update={"seconds": 0})})
        )
    assert found[0].model_dump_json() == found[1].model_dump_json() == found[2].model_dump_json()
