"""Linear programs apart from what they are used for."""

import os
import threading
from types import SimpleNamespace

from hexgen2.search.linear_program import run


class Talkative:
    """A solver that prints, as HiGHS does when it repairs a solution."""

    HandleUserInterrupt = False

    def run(self):
        os.write(1, b"tmpSolver.run();\n")


def test_what_a_solver_prints_stays_out_of_stdout(capfd):
    print("result: 1")
    threads = [threading.Thread(target=run, args=[Talkative()]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(Talkative())
    print("result: 2")
    said = capfd.readouterr()
    assert said.out == "result: 1\nresult: 2\n"
    assert said.err.count("tmpSolver") == 9


def test_there_may_be_no_stdout(capfd):
    kept, silent = os.dup(1), SimpleNamespace(run=lambda: None)
    os.close(1)
    try:
        run(silent)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
