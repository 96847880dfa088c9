"""Runs tiny models on replicas of every kind, and compares their tokens with those of transformers."""

from __future__ import annotations

import asyncio
import random
import sys
from itertools import cycle, product
from pathlib import Path

import torch

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
sys.path.append(str(SUPPORT))

import checkpoints  # noqa: E402
import quantised  # noqa: E402
from engine_harness import Cluster, Shape  # noqa: E402
from headwise import headwise_placement, with_blocks  # noqa: E402
from live_fleet import live_fleet, tokens_of  # noqa: E402
from range_fleet import range_fleet, ranges_placement  # noqa: E402

from cost_model.errors import InputError  # noqa: E402
from cost_model.models import find_model  # noqa: E402
from runtime.checkpoint import check_family  # noqa: E402
from runtime.options import TORCH  # noqa: E402
from runtime.protocol.message import Sampling  # noqa: E402

LAYERS, TOKENS = checkpoints.LAYERS, 24
LENGTHS = (1, 6, 17, 40)
SHAPES: dict[str, Shape] = {
    "one": [(1, 0, LAYERS)],
    "other": [(1, 0, LAYERS)],
    "uneven": [(2, 0, 2), (1, 2, LAYERS)],
    "stages": [(1, 0, 3), (1, 3, LAYERS)],
}
ROUTES = {
    "colocated": [("one", "one")],
    "P/D": [("one", "other")],
    "uneven": [("uneven", "stages"), ("stages", "uneven")],
}
RANGES, FLOWS = {"a": (0, 3), "b": (2, LAYERS)}, {("a", "b"): 1.0}
PACKED = {"gpt_oss": ("mxfp4", checkpoints.write_gpt_oss_mxfp4)}
"""Formats in which a family's weights stay packed, and what writes such a checkpoint."""
QUANTISED = tuple(quantised.FORMATS)
"""Formats in which the weights of every other family stay packed."""
EXACT = 1e-4
"""Scores in float32 that differ by less are tied."""
OUTLIER = 4.0
"""Times the median of what scores are off by: beyond it, rounding has changed which experts compute."""

Prompts = list[list[int]]


def prompts() -> Prompts:
    rng = random.Random(3)
    return [[rng.randrange(3, checkpoints.VOCAB) for _ in range(length)] for length in LENGTHS]


class Truth:
    """What transformers says about a checkpoint in a type.

    Parameters
    ----------
    exact : folder of what the checkpoint rounds, if it rounds activations; None: its own weights, in float32

    Attributes
    ----------
    tokens : that it generates greedily
    """

    def __init__(self, folder: Path, dtype: torch.dtype, exact: Path | None = None) -> None:
        self._model = checkpoints.by_transformers(folder, dtype)
        self._exact = checkpoints.by_transformers(exact or folder, dtype).float()
        self.tokens = [self._greedy(prompt) for prompt in prompts()]

    @torch.inference_mode()
    def _greedy(self, prompt: list[int]) -> list[int]:
        found = list(prompt)
        for _ in range(TOKENS):
            found.append(int(self._model(torch.tensor([found])).logits[0, -1].argmax()))
        return found[len(prompt) :]

    def verdict(self, answers: list[list[int]]) -> str:
        """How answers to all prompts, once or several times over, compare with what was generated."""
        asked = list(zip(cycle(zip(prompts(), self.tokens, strict=True)), answers, strict=False))
        if all(answer == expected for (_, expected), answer in asked):
            return "equal"
        if any(len(answer) != len(expected) for (_, expected), answer in asked):
            return "WRONG"
        both = [self._off(prompt, answer) for (prompt, _), answer in asked]
        gaps, off = (torch.cat(parts) for parts in zip(*both, strict=True))
        usual = OUTLIER * off.median() + EXACT
        return "ties" if (gaps > usual).sum() <= (off > usual).sum() else "WRONG"

    @torch.inference_mode()
    def _off(self, prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token of an answer: by how much another one scores higher in exact arithmetic, and by how
        much the scores of this type are off."""
        whole = torch.tensor([prompt + answer])
        exact, rounded = (
            m(whole).logits[0, len(prompt) - 1 : -1].float() for m in (self._exact, self._model)
        )
        gaps = exact.max(-1).values - exact.gather(1, whole[0, len(prompt) :, None])[:, 0]
        return gaps, (exact - rounded).abs().max(-1).values


def by_routes(folder: Path, dtype: str, truth: Truth) -> dict[str, str]:
    """The columns of replicas with all their KV heads: one verdict each."""
    sampling, found = Sampling(max_tokens=TOKENS, ignore_eos=True), dict[str, str]()
    with Cluster(folder, SHAPES, dtype=dtype) as cluster:
        for column, routes in ROUTES.items():
            names = []
            for (source, target), (number, prompt) in product(routes, enumerate(prompts())):
                names.append(f"{column} {source} {target} {number}")
                cluster.submit(names[-1], prompt, sampling, source, target)
            found[column] = truth.verdict([cluster.finish(name).tokens for name in names])
    return found


async def by_attention_workers(folder: Path) -> list[list[int]]:
    """The answers of a replica with two attention workers, which hold most of its KV heads."""
    placement = headwise_placement(folder, [("box/0", LAYERS)])
    check_family(placement, TORCH, "placement.json")
    async with live_fleet(placement, folder, change=with_blocks(60, 60, 60)) as fleet:
        return [await tokens_of(fleet.submit(prompt, TOKENS)) for prompt in prompts()]


async def by_ranges(folder: Path) -> list[list[int]]:
    """The answers of two replicas with overlapping ranges of layers."""
    placement = ranges_placement(folder, RANGES, FLOWS, True)
    async with range_fleet(placement, folder) as fleet:
        return [[each.token async for each in fleet.submit(prompt, TOKENS)] for prompt in prompts()]


def cells(work: Path, family: str, kind: str) -> dict[str, str | InputError]:
    """The verdict of each kind of replica, or why it is refused, for a family in a type, or packed with
    activations in float32. What depends on no type is tried in float32 only."""
    write = PACKED[family][1] if kind == "packed" else checkpoints.WRITERS[family]
    folder, dtype = write(work / f"{family}-{kind}"), "bfloat16" if kind == "bfloat16" else "float32"
    truth = Truth(folder, getattr(torch, dtype))
    found: dict[str, str | InputError] = dict(by_routes(folder, dtype, truth))
    if dtype == "float32":
        for column, answers in (("attention workers", by_attention_workers), ("ranges", by_ranges)):
            try:
                found[column] = truth.verdict(asyncio.run(answers(folder)))
            except InputError as error:
                found[column] = error
    return found


def in_format(original: Path, name: str, work: Path) -> str:
    """What a model in float32 gives in one of the QUANTISED formats: "equal", or the kinds of replicas whose
    tokens are not those of transformers with the same weights. Where activations are rounded, transformers
    rounds them, too; "ties": tokens differ, by no more than what rounding changes."""
    folder, plain = work / original.name / "quantised", work / original.name / "plain"
    quantised.quantise(original, name, folder, plain)
    with quantised.without_lowest_code():
        rounds = name in quantised.ROUNDED
        same = quantised.the_same_in_transformers(original.name, name, folder, plain)
        truth = Truth(same, torch.float32, plain)
        found = by_routes(folder, "float32", truth)
    if rounds and "WRONG" not in found.values() and "ties" in found.values():
        return "ties"
    return ", ".join(kind for kind, verdict in found.items() if verdict != "equal") or "equal"


def refusal(work: Path, name: str) -> InputError | None:
    """Why the engine does not run a shipped model."""
    placement = headwise_placement(checkpoints.write_llama(work / name), [("box/0", LAYERS)])
    try:
        check_family(placement.model_copy(update={"model": find_model(name)}), TORCH, "placement.json")
    except InputError as error:
        return error
    return None
