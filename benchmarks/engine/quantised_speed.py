"""Compare quantised checkpoints with the same model in float32, and with vLLM and llama.cpp on CPUs.

    python -m benchmarks.engine.quantised_speed [--rounds 3] [--batches 1,8] [--layers 8] [--attempts 1]
        [--formats float32 W8A8 ...] [--dtype bfloat16] [--vllm-python PYTHON] [--llama-cpp-python PYTHON]

A random Llama of 0.4 billion parameters is written in float32, bfloat16, int8 (compressed-tensors, per
channel), W8A8 (the same, with activations in int8, too), fp8 (per channel) and int4 (GPTQ, groups of 128);
what these do not quantise is in bfloat16. Each side is a process of its own, as in engine_speed:

- our engine once for each checkpoint, computing in float32, or all but the first in --dtype
- vLLM (--vllm-python) in float32, and in bfloat16 with the W8A8 and int4 checkpoints, if it has kernels
- llama.cpp (--llama-cpp-python: an interpreter that has llama-cpp-python, gguf and safetensors) with the
  float32 weights, and with those that it makes of them in bfloat16, Q8_0 and Q4_0; what it multiplies by the
  latter two it rounds to 8 bits, in blocks of 32

Sides take turns in each round, with greedy sampling: prompts of 128 tokens with 64 new ones at each batch
size, then one prompt of 512 tokens.

Prints, for each side, the weights that our worker keeps in memory, and tokens/s: the median over rounds, and
what the fastest tenth of decode steps (the fastest prefill) reaches, which other programs disturb least. In
brackets is how many times our float32 that is.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engine.engine_speed import (
    NEW_TOKENS,
    PREFILL_TOKENS,
    PROMPT_TOKENS,
    ROOT,
    SIDES,
    VOCABULARY,
    Case,
    Seen,
    Side,
    measure,
    started,
)
from benchmarks.serving.fleet import make_placement
from cost_model.config import architecture_from_folder
from runtime.engine.rank import Rank
from runtime.engine.torch.collectives import Collectives
from runtime.engine.torch.models import load_stage
from runtime.protocol.message import StageShape

sys.path.append(str(ROOT / "tests" / "support"))

FLOAT32, BFLOAT16 = "float32", "bfloat16"
FORMATS = {
    "int8": "compressed-tensors int8",
    "W8A8": "W8A8",
    "fp8": "compressed-tensors fp8",
    "int4": "GPTQ 4 bits, groups of 128",
}
"""Names in `quantised`, the module of the tests that writes them."""
NAMES = (FLOAT32, BFLOAT16, *FORMATS)
BY_VLLM = {FLOAT32: FLOAT32, "W8A8": BFLOAT16, "int4": BFLOAT16}
BY_LLAMA_CPP = {FLOAT32: "F32", BFLOAT16: "BF16", "W8A8": "Q8_0", "int4": "Q4_0"}
MEMORY_GIB = 8


def make_models(folder: Path, layers: int, names: Collection[str]) -> dict[str, Path]:
    """Write the checkpoints in these formats; their folders by format."""
    from quantised import quantise

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype=FLOAT32,
    )
    folders = {name: folder / name for name in NAMES}
    model = LlamaForCausalLM(config)
    model.save_pretrained(folders[FLOAT32])
    model.bfloat16().save_pretrained(folders[BFLOAT16])
    for name, stored in FORMATS.items():
        if name in names:
            quantise(folders[BFLOAT16], stored, folders[name])
    return {name: folders[name] for name in NAMES if name in names}


@contextmanager
def sides(folders: dict[str, Path], work: Path, options: argparse.Namespace) -> Iterator[list[Side]]:
    """All sides, running."""
    with ExitStack() as stack:
        found = []
        for name, folder in folders.items():
            own = work / f"placement-{name}"
            own.mkdir()
            placement = make_placement(own, folder, True, PROMPT_TOKENS, NEW_TOKENS, MEMORY_GIB)
            script, dtype = str(ROOT / SIDES / "our_engine.py"), dtype_of(name, options)
            command = [sys.executable, script, str(folder), dtype, str(placement)]
            found.append(stack.enter_context(started(f"hexgen2 {name}", ROOT, command)))
        for name, dtype in BY_VLLM.items() if options.vllm_python else ():
            if name in folders:
                script = str(ROOT / SIDES / "vllm_offline.py")
                command = [options.vllm_python, script, str(folders[name]), dtype, "compiled"]
                found += _if_it_starts(stack, f"vllm {name}", command)
        for name, kind in BY_LLAMA_CPP.items() if options.llama_cpp_python else ():
            if name in folders:
                script = str(ROOT / SIDES / "llama_cpp_batches.py")
                command = [options.llama_cpp_python, script, str(folders[FLOAT32]), kind]
                found += _if_it_starts(stack, f"llama.cpp {kind}", command)
        yield found


def dtype_of(name: str, options: argparse.Namespace) -> str:
    """What our engine computes in with a format."""
    return FLOAT32 if name == FLOAT32 else options.dtype


def _if_it_starts(stack: ExitStack, name: str, command: list[str]) -> list[Side]:
    """A side of a peer; none if this build of it cannot run the format here."""
    try:
        return [stack.enter_context(started(name, ROOT, command))]
    except SystemExit as failed:
        print(f"{name} did not start: {str(failed).strip().splitlines()[-1]}", flush=True)
        return []


def weights_mb(folder: Path, dtype: str) -> float:
    """What a worker that computes in this type keeps of a checkpoint in memory."""
    stages, cpu = (
        (StageShape(workers=("one",), first_layer=0, end_layer=_layers(folder)),),
        torch.device("cpu"),
    )
    collectives = Collectives(Rank.find(stages, "one"), cpu)
    return load_stage(str(folder), dtype, cpu, collectives).checkpoint.bytes_read / 1e6


def _layers(folder: Path) -> int:
    return architecture_from_folder(folder).layers


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--formats", nargs="*", default=NAMES, choices=NAMES, help="float32 is always one")
    parser.add_argument("--dtype", default=FLOAT32, choices=(FLOAT32, BFLOAT16), help="of all other formats")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--llama-cpp-python", help="interpreter of an environment with llama.cpp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases = [Case(int(batch), PROMPT_TOKENS, NEW_TOKENS) for batch in options.batches.split(",")]
    cases.append(Case(1, PREFILL_TOKENS, 1))
    rng = random.Random(options.seed)
    seen: dict[tuple[str, Case], list[list[list[float]]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        folders = make_models(work, options.layers, {FLOAT32, *options.formats})
        weights = {name: weights_mb(own, dtype_of(name, options)) for name, own in folders.items()}
        with sides(folders, work, options) as running:
            for number in range(options.rounds + 1):  # the first round warms up
                for case in cases:
                    seed = rng.random()
                    for side in rng.sample(running, len(running)):
                        answer, _ = measure(side, case, seed, options.attempts)
                        if number:
                            seen[side.name, case].append(answer["times_s"])
    print("| | weights, MB | " + " | ".join(map(titled, cases)) + " |")
    print("| --- " * (2 + len(cases)) + "|")
    for side in running:
        cells = []
        for case in cases:
            ours, base = (rates(case, seen[name, case]) for name in (side.name, f"hexgen2 {FLOAT32}"))
            shown = [f"{own:.1f} ({own / other:.2f})" for own, other in zip(ours, base, strict=True)]
            cells.append(", ".join(shown))
        size = f"{weights[side.name.split()[1]]:.0f}" if side.name.startswith("hexgen2") else ""
        print(f"| {side.name} | {size} | " + " | ".join(cells) + " |")


def rates(case: Case, rounds: list[list[list[float]]]) -> tuple[float, float]:
    """Tokens/s: the median over rounds, and at the fastest tenth of steps; from the times of all tokens."""
    median = statistics.median(Seen.of(case, times_s).rate for times_s in rounds)
    if not case.decodes:
        return median, max(Seen.of(case, times_s).rate for times_s in rounds)
    steps_s = [after - before for times_s in rounds for before, after in pairwise(times_s[0])]
    return median, case.batch / statistics.quantiles(steps_s, n=10)[0]


def titled(case: Case) -> str:
    """The heading of a case's column."""
    return f"decode, batch {case.batch}" if case.decodes else f"prefill of {case.prompt_tokens}"


if __name__ == "__main__":
    main()
