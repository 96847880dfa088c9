"""Compare the torch engine with transformers, vLLM on CPU and the limits of the machine.

    python -m benchmarks.engine.engine_speed [--dtypes float32,bfloat16] [--rounds 5] [--batches 1,8,32]
        [--attempts 1] [--families llama,qwen3_moe] [--vllm-python PYTHON] [--before CHECKOUT]

A random Llama of 82 million parameters, or each of other --families (families.py), runs on all cores of this
machine, with greedy sampling: prompts of 128 tokens with 64 new ones at each batch size, then prompts of 512
tokens with a single new one. Each side
(sides/) is a separate process that loads the model once; in every round each side gets the same new random
prompts, one side after the other in a new random order. Our side is one colocated worker behind the
coordinator, without HTTP. vLLM needs its own interpreter (--vllm-python). transformers runs with both of its
caches, vLLM compiled and eager; the better of the two counts in every row. --before adds the engine of
another checkout; --before-script says where its side is.

Prints medians over rounds, in tokens/s: `overall` from handing over the prompts to the last token, `decode`
from the moment when all requests have their first token until one has its last, `prefill` counts prompt
tokens until all requests have their first token. `least` and `most` are over the rounds' decode (or prefill).
Where other programs took more than 2 % of the CPU time, a measurement is repeated up to --attempts times and
the least disturbed one counts; the last column is their share in the worst case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine.families import FAMILIES, VOCABULARY, make_model
from benchmarks.serving.fleet import make_placement
from benchmarks.simulator.against_fleet import least_disturbed

ROOT = Path(__file__).resolve().parents[2]
SIDES = Path("benchmarks/engine/sides")
PROMPT_TOKENS, NEW_TOKENS = 128, 64
PREFILL_TOKENS, PREFILL_BATCHES = 512, (1, 8)
OURS, BEFORE, LIMITS = "hexgen2", "before", "limits"
BETWEEN_S = 0.3
"""Pause between sides, until the previous side's threads have stopped spinning for more work."""
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Case:
    """A batch of prompts of equal length, each followed by a number of new tokens."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def decodes(self) -> bool:
        return self.new_tokens > 1

    def __str__(self) -> str:
        what = f"{self.new_tokens} new tokens" if self.decodes else "prefill only"
        return f"batch {self.batch}, prompts of {self.prompt_tokens} tokens, {what}"


@dataclass(frozen=True)
class Seen:
    """Tokens/s of one run of a case; `rate` counts decode steps, or the prefill if there are none."""

    overall: float
    rate: float

    @classmethod
    def of(cls, case: Case, times_s: list[list[float]]) -> Seen:
        """Rates from the time of each token of each request."""
        assert [len(times) for times in times_s] == [case.new_tokens] * case.batch
        all_begun, end = max(times[0] for times in times_s), max(times[-1] for times in times_s)
        overall = case.batch * case.new_tokens / end
        if not case.decodes:
            return cls(overall, case.batch * case.prompt_tokens / all_begun)
        first_ends = min(times[-1] for times in times_s)
        within = sum(all_begun < each <= first_ends for times in times_s for each in times)
        return cls(overall, within / (first_ends - all_begun))


class Side:
    """A process that answers cases."""

    def __init__(self, name: str, process: psutil.Popen, log: Any) -> None:
        self.name, self.process, self._log = name, process, log

    def ask(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self.name} ended:\n{self._log.read()[-3000:]}")
        return json.loads(line)


@contextmanager
def started(name: str, checkout: Path, command: list[str]) -> Iterator[Side]:
    """Start a side and wait until it has loaded."""
    settings = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    settings["PYTHONPATH"] = str(checkout)
    if "vllm" in name:
        settings |= VLLM_SETTINGS
    with tempfile.TemporaryFile("w+") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        process = psutil.Popen(command, env=settings, cwd=checkout, **pipes)
        try:
            side = Side(name, process, log)
            side.answer()
            yield side
        finally:
            process.stdin.close()
            process.wait(60)


def commands(
    family: str, model: Path, placement: Path, dtype: str, options: argparse.Namespace
) -> dict[str, tuple[Path, list[str]]]:
    """The checkout and the command of each side."""

    def side(name: str, *last: str, python: str = sys.executable) -> tuple[Path, list[str]]:
        return ROOT, [python, str(ROOT / SIDES / f"{name}.py"), str(model), dtype, *last]

    sides = {OURS: side("our_engine", str(placement))}
    if options.before is not None:
        script = options.before / options.before_script
        sides[BEFORE] = options.before, [sys.executable, str(script), str(model), dtype, str(placement)]
    for cache in ("dynamic", "static"):
        sides[f"transformers {cache}"] = side("transformers_generate", cache)
    if options.vllm_python is not None:
        for mode in ("compiled", "eager"):
            sides[f"vllm {mode}"] = side("vllm_offline", mode, python=options.vllm_python)
    if family == "llama":
        sides[LIMITS] = side("limits")
    return sides


def compare(sides: list[Side], cases: list[Case], options: argparse.Namespace) -> None:
    """Run all rounds of all cases, and print a table for each case."""
    rng = random.Random(options.seed)
    for side in sides:
        for case in cases:
            if side.name != LIMITS:
                side.ask(random_prompts(case, rng), case.new_tokens)
    for case in cases:
        answers: dict[str, list[dict[str, Any]]] = defaultdict(list)
        disturbed: dict[str, float] = defaultdict(float)
        for _ in range(options.rounds):
            seed = rng.random()
            for side in rng.sample(sides, len(sides)):
                answer, others = measure(side, case, seed, options.attempts)
                answers[side.name].append(answer)
                disturbed[side.name] = max(disturbed[side.name], others)
        print_case(case, answers, disturbed)


def measure(side: Side, case: Case, seed: float, attempts: int) -> tuple[dict[str, Any], float]:
    """An answer, and other programs' share of the CPU time meanwhile."""
    rng = random.Random(seed)

    def ask() -> dict[str, Any]:
        return side.ask(random_prompts(case, rng), case.new_tokens)

    time.sleep(BETWEEN_S)  # Not while CPU time is counted: what the previous side spins away is not others'.
    return least_disturbed(ask, side.process, attempts)


def random_prompts(case: Case, rng: random.Random) -> list[list[int]]:
    return [rng.choices(range(VOCABULARY), k=case.prompt_tokens) for _ in range(case.batch)]


def print_case(
    case: Case, answers: Mapping[str, list[dict[str, Any]]], disturbed: Mapping[str, float]
) -> None:
    """Print what each side reached, beside the limits and the best of the other engines."""
    tokens = case.batch * (1 if case.decodes else case.prompt_tokens)
    seen = {
        name: [Seen.of(case, answer["times_s"]) for answer in found]
        for name, found in answers.items()
        if name != LIMITS
    }
    rates = {name: statistics.median(run.rate for run in runs) for name, runs in seen.items()}
    best = max(rate for name, rate in rates.items() if name not in (OURS, BEFORE))
    limits, heading = dict[str, float](), str(case)
    if LIMITS in answers:
        kinds = ("memory", "products") if case.decodes else ("products",)
        for kind in kinds:
            limits[kind] = statistics.median(tokens / limit[f"{kind}_s"] for limit in answers[LIMITS])
        bandwidth = statistics.median(limit["bytes_s"] for limit in answers[LIMITS]) / 1e9
        heading += f"; {bandwidth:.1f} GB/s, products by {answers[LIMITS][0]['call']}"
    rate = "decode" if case.decodes else "prefill"
    print(f"\n{heading}")
    titles = ("overall", rate, "least", "most", "of best peer", *(f"of {kind}" for kind in limits), "others")
    print(f"{'':22}" + "".join(f"{title:>13}" for title in titles))
    for name, runs in seen.items():
        figures = [statistics.median(run.overall for run in runs), rates[name]]
        figures += [min(run.rate for run in runs), max(run.rate for run in runs)]
        shares = [rates[name] / best, *(rates[name] / limit for limit in limits.values())]
        row = "".join(f"{value:>13.1f}" for value in figures) + "".join(f"{value:>13.2f}" for value in shares)
        print(f"{name:22}{row}{disturbed[name]:>13.0%}")
    for kind, limit in limits.items():
        print(f"{'limit of ' + kind:22}{'':13}{limit:>13.1f}", flush=True)


def main() -> None:
    """Run the comparison for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--families", default="llama", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--before", type=Path, help="another checkout, whose engine to compare as well")
    parser.add_argument("--before-script", type=Path, default=SIDES / "our_engine.py")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.before = options.before and options.before.resolve()  # the sides run there
    cases = [Case(int(batch), PROMPT_TOKENS, NEW_TOKENS) for batch in options.batches.split(",")]
    cases += [Case(batch, PREFILL_TOKENS, 1) for batch in PREFILL_BATCHES]
    for family in options.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            work, model = Path(folder), Path(folder) / "model"
            make_model(model, family)
            placement = make_placement(work, model, True, PROMPT_TOKENS, NEW_TOKENS)
            for dtype in options.dtypes.split(","):
                print(f"\n{family}, {dtype}", flush=True)
                with ExitStack() as stack:
                    wanted = commands(family, model, placement, dtype, options)
                    sides = [stack.enter_context(started(name, *how)) for name, how in wanted.items()]
                    compare(sides, cases, options)


if __name__ == "__main__":
    main()
