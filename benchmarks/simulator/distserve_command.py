"""Run DistServe's simulator as a command that takes requests and returns the times of their tokens."""

from __future__ import annotations

import csv
import json
import resource
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from cost_model.errors import InputError
from hexgen2.workload.requests import Requests

# simulate_dist.main() uses the prefill instance's tensor degree for decode steps and ignores --tp-decode.
_RUN = """
from simdistserve.benchmarks import simulate_dist as command
asked, config = command.parse_args(), command.WorkerConfig
command.WorkerConfig = lambda **given: config(**{**given, "TP_Decode": asked.tp_decode})
command.main(asked)
"""


class DistServe:
    """One prefill and one decode instance ("distserve"), or one instance that does both ("vllm").

    Parameters
    ----------
    folder : a checkout of https://github.com/LLMServe/DistServe
    python : an interpreter with simpy, numpy and pandas

    Raises
    ------
    InputError : the simulator does not run
    """

    def __init__(self, folder: Path, python: str, backend: str, model: str) -> None:
        self.folder, self.python = folder.resolve(), python
        self._options = ["--backend", backend, "--model", model]
        one = np.ones(1, dtype=np.int64)
        self._start_s = 0.0
        self._start_s = self.simulate(Requests(np.zeros(1), one, one, ""), {})[2]

    def simulate(self, requests: Requests, degrees: dict[str, int]) -> tuple[np.ndarray, np.ndarray, float]:
        """Seconds from the arrival of each request to its first and to its last token, [n] each, and the CPU
        seconds of the simulation without start-up.

        Parameters
        ----------
        degrees : tensor-parallel degree of the instances by role
        """
        with tempfile.TemporaryDirectory() as folder:
            asked, answer = Path(folder) / "requests.json", Path(folder) / "latency.csv"
            # DistServe counts only the tokens after the first one.
            columns = requests.isl.tolist(), (requests.osl - 1).tolist(), requests.arrival_s.tolist()
            keys = "prompt_len", "output_len", "start_time"
            listed = [dict(zip(keys, own, strict=True)) for own in zip(*columns, strict=True)]
            asked.write_text(json.dumps(listed))
            options = [*self._options, "--N", str(len(requests)), "--workload", str(asked)]
            options += [f"--tp-{role}={degree}" for role, degree in degrees.items()]
            spent_s = self._run([*options, "--output-request-latency", str(answer)])
            with answer.open() as file:
                rows = list(csv.DictReader(file))
        first, last = (
            np.array([float(r[k]) for r in rows]) for k in ("first_token_latency", "total_latency")
        )
        return first / 1e3, last / 1e3, max(spent_s - self._start_s, 1e-3)

    def _run(self, options: list[str]) -> float:
        before = _children_s()
        try:
            done = subprocess.run(
                [self.python, "-c", _RUN, *options], cwd=self.folder, capture_output=True, text=True
            )
        except OSError as error:
            raise InputError("--python", self.python, f"does not run: {error}", "name a Python") from error
        if done.returncode:
            said = (done.stderr.strip() or "nothing").splitlines()[-1]
            remedy = "see --distserve and --python"
            raise InputError(str(self.folder), "", f"DistServe's simulator failed: {said}", remedy)
        return _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
