"""Time one sampling step, by rule, number of rows and vocabulary size.

    python -m benchmarks.engine.sampler_speed [--device cuda] [--threads N]

Prints milliseconds, the median over several steps. Logits are normal with a standard deviation of 4 (peaked,
like those of a trained model) or 1 (flat: top_p keeps much of the vocabulary). Histories for the penalties
have 1200 tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch

from runtime.engine.torch.sampling.sampler import Sampler
from runtime.protocol.message import Sampling

SHAPES = [(1, 8192), (8, 8192), (32, 8192), (128, 8192), (32, 128256)]
PEAKED, FLAT = 4.0, 1.0
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 200
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
RULES: list[tuple[str, float, dict[str, Any]]] = [
    ("greedy", PEAKED, {}),
    ("temperature", PEAKED, {"temperature": 1.0}),
    ("top_k 50", PEAKED, {"temperature": 1.0, "top_k": 50}),
    ("top_p 0.9", PEAKED, {"temperature": 0.7, "top_p": 0.9}),
    ("top_p 0.9, flat", FLAT, {"temperature": 0.7, "top_p": 0.9}),
    ("min_p 0.05", PEAKED, {"temperature": 1.0, "min_p": 0.05}),
    ("greedy, penalties", PEAKED, PENALTIES),
    ("greedy, 5 logprobs", PEAKED, {"logprobs": 5}),
]


def main() -> None:
    """Print one row per rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'rows x vocabulary':20}" + "".join(f"{f'{rows} x {vocab}':>13}" for rows, vocab in SHAPES))
    for name, spread, rule in RULES:
        taken = [step_ms(rows, vocab, spread, rule, arguments) for rows, vocab in SHAPES]
        print(f"{name:20}" + "".join(f"{each:>13.2f}" for each in taken), flush=True)


def step_ms(
    rows: int, vocab: int, spread: float, rule: dict[str, Any], arguments: argparse.Namespace
) -> float:
    """Median milliseconds of a step."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(arguments.device)
    sampler, names, chance = Sampler(), [f"r{row}" for row in range(rows)], random.Random(0)
    for seed, name in enumerate(names):
        past = [chance.randrange(vocab) for _ in range(PROMPT_TOKENS + OUTPUT_TOKENS)]
        sampler.start(name, Sampling(seed=seed, **rule), (past[:PROMPT_TOKENS], past[PROMPT_TOKENS:]))
    sampler.sample(logits, names, [0] * rows)
    taken = []
    for step in range(1, arguments.steps + 1):
        began = time.perf_counter()
        sampler.sample(logits, names, [step] * rows)
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
