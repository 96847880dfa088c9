"""Run hexgen2 commands one after the other in this process and print digests of their output.

    python answers.py [--disturb SEED] FOLDER < commands.json

Reads a JSON list of argument lists and runs them inside FOLDER, so that a command can read what an earlier
one wrote with -o. Prints a JSON list of digests. Each process stands for one kind of machine (machines.py).

    python answers.py --serve SECONDS

Reads one such list from each line of standard input, runs it in a forked process inside a fresh folder, and
prints one line with the digests and the seconds of each command, or null if they take longer than SECONDS per
command.

--disturb changes the last bits of all costs and picks other bases for eigenspaces, as a library, processor or
compiler that is not available here might do.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LOST = "first GPU"
"""Placeholder in a command for the first GPU of the first replica of the placement that it reads."""
TIMES = re.compile(r'"(seconds|[a-z]+_wall_s)": [-+.e0-9]+')


def digest(text: str) -> str:
    """SHA-256 of a text, without the search times that it states."""
    return hashlib.sha256(TIMES.sub(r'"\1": 0', text).encode()).hexdigest()


def rounded(value: Any) -> Any:
    """The text with all numbers rounded to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def answer(arguments: list[str]) -> dict[str, Any]:
    """Exit code, digests of what the command printed and wrote, and a digest of the output at six digits."""
    from hexgen2.cli import run

    if LOST in arguments:
        replicas = json.loads(Path(arguments[arguments.index("--from") + 1]).read_text())["replicas"]
        arguments = [replicas[0]["stages"][0]["gpus"][0] if word == LOST else word for word in arguments]
    printed, code = io.StringIO(), 0
    sys.argv = ["hexgen2", *arguments]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            run()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    text = printed.getvalue()
    found: dict[str, Any] = {"code": code, "printed": digest(text)}
    if text.startswith("{"):
        found["roughly"] = digest(json.dumps(rounded(json.loads(text))))
    if code != 0:
        found["errors"] = errors.getvalue()
    if "-o" in arguments:
        written = Path(arguments[arguments.index("-o") + 1])
        found["written"] = digest(written.read_text())
    return found


def disturb(seed: int) -> None:
    """Change the last bits of costs and the bases of eigenspaces."""
    from cost_model import base, calibrated
    from cost_model.engines.model import EngineSteps

    EngineSteps.layer_work_s = _with_other_bits(EngineSteps.layer_work_s, seed)  # type: ignore[method-assign]
    EngineSteps.edge_work_s = _with_other_bits(EngineSteps.edge_work_s, seed)  # type: ignore[method-assign]
    calibrated.layer_s = _with_other_bits(calibrated.layer_s, seed)
    calibrated.edge_s = _with_other_bits(calibrated.edge_s, seed)
    base.CostModel.hop_work_s = _with_other_bits(base.CostModel.hop_work_s, seed)  # type: ignore[method-assign]
    solve, draw = np.linalg.eigh, np.random.default_rng(seed)

    def other_basis(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = solve(matrix)
        begins = 0
        while begins < len(values):
            equal = np.flatnonzero(values[begins:] - values[begins] < 1e-11 * np.abs(values).max())
            span = slice(begins, begins + len(equal))
            turned, _ = np.linalg.qr(draw.normal(size=(len(equal), len(equal))))
            vectors[:, span] = vectors[:, span] @ turned
            begins = span.stop
        return values, vectors + 1e-15 * draw.normal(size=vectors.shape)

    np.linalg.eigh = other_basis  # type: ignore[assignment]


def _with_other_bits(function: Callable[..., float], seed: int) -> Callable[..., float]:
    """Wrap a function so that its results are off by up to three units in the last place. The same arguments
    always give the same result, as they do on any one machine."""

    def other(*arguments: Any) -> float:
        mixed = hashlib.blake2b(repr((seed, arguments[-2:])).encode(), digest_size=4).digest()
        return function(*arguments) * (1 + 6e-16 * (int.from_bytes(mixed, "little") / 2**31 - 1))

    return other


def serve(timeout_s: int) -> None:
    """Answer one line of standard input after the other until it ends."""
    import networkx  # noqa: F401  imported before the forks, so that no command's time includes it

    from hexgen2.cli import COMMANDS, imported

    for name in COMMANDS:
        imported(name)
    for line in sys.stdin:
        print(_in_a_fork(json.loads(line), timeout_s), flush=True)


def _in_a_fork(commands: list[list[str]], timeout_s: int) -> str:
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        if (child := os.fork()) == 0:
            os.chdir(folder)
            signal.alarm(timeout_s * len(commands))
            os.write(writer, json.dumps([_timed(command) for command in commands]).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as answers:
            text = answers.read()
        os.waitpid(child, 0)
    return text or "null"


def _timed(command: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    return answer(command) | {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--disturb", type=int)
    parser.add_argument("--serve", type=int, metavar="SECONDS")
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        sys.exit()
    commands = json.load(sys.stdin)
    if options.disturb is not None:
        disturb(options.disturb)
    os.chdir(options.folder)
    json.dump([answer(command) for command in commands], sys.stdout)
