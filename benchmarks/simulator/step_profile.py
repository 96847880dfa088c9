"""Measure the step times of a launched replica with a few requests through its API, and make a cost model of
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cost_model.architecture import ModelArchitecture
from cost_model.base import TensorGroup, Work
from cost_model.calibrated import Calibrated
from cost_model.lengths import RequestLengths, attended_tokens
from hexgen2.bench.measurements import Measurements
from hexgen2.bench.run import Load, measure
from hexgen2.workload.requests import Requests

LENGTHS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 960)
BURSTS = ((9, 32), (5, 64), (9, 64), (5, 128), (7, 128))
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""Every small size, because a matrix product of 3 rows can take longer than one of 4."""
CONTEXTS = ((4, 384), (8, 256))
MIXED = (2, 4, 8, 12)
"""Requests that decode while prompts of MIXED_PROMPT tokens come, MIXED_EVERY_S apart."""
MIXED_PROMPT, MIXED_PROMPTS, MIXED_EVERY_S = 160, 4, 0.5
SHORT, STEPS, REPEATS = 16, 40, 5
TOGETHER_S = 0.01
"""First tokens less than this apart come from the same step."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of steps.

    lengths, prompt_s : seconds of a step with so many prompt tokens, without attention; linear between and
        beyond
    attended_s : for each token that these attend to
    mixed_decode_s : for each decode in a step that also has prompts
    batches, decode_s : seconds of a decode step without context, by batch size; linear between and beyond
    context_s : seconds per token of context
    front_end_s : what a request costs outside the workers
    """

    lengths: tuple[float, ...]
    prompt_s: tuple[float, ...]
    attended_s: float
    mixed_decode_s: float
    batches: tuple[float, ...]
    decode_s: tuple[float, ...]
    context_s: float
    front_end_s: float

    def prefill(self, tokens: float, attended: float) -> float:
        """Seconds of a step with prompts only."""
        return _linear(tokens, self.lengths, self.prompt_s) + attended * self.attended_s

    def decode(self, requests: float, context: float) -> float:
        """Seconds of a decode step."""
        return _linear(requests, self.batches, self.decode_s) + context * self.context_s

    def mixed(self, tokens: float, attended: float, requests: float, context: float) -> float:
        """Seconds of a step with both: less than the two steps, since it reads the weights once."""
        of_decodes = requests * self.mixed_decode_s + context * self.context_s
        return self.prefill(tokens, attended) + of_decodes


class Profiled(Calibrated):
    """Step times of replicas with one worker each, from a profile; memory and bytes as in the default
    model."""

    name = "profiled"

    def __init__(self, model: ModelArchitecture, lengths: RequestLengths, times: StepTimes) -> None:
        super().__init__(model, lengths)
        self.times = times

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        prompt, decode = (work.prompt_tokens, work.prompt_attended), (work.decodes, work.context)
        if not work.decodes:
            seconds = self.times.prefill(*prompt) if work.prompt_tokens else 0.0
        else:
            seconds = self.times.mixed(*prompt, *decode) if work.prompt_tokens else self.times.decode(*decode)
        return seconds / self.model.layers

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        return 0.0


def profile(url: str, colocated: bool) -> StepTimes:
    """Profile a fleet of one route, while it serves nothing else."""
    decodes = [(batch, SHORT, _decode_s(url, batch, SHORT)) for batch in BATCHES]
    decodes += [(batch, length, _decode_s(url, batch, length)) for batch, length in CONTEXTS]
    batches, decode_s, context_s = fit_decode(decodes)
    # A prompt of one token takes the step of one decode, so the rest is the front end.
    front_end_s = max(0.0, _alone_s(url, 1) - decode_s[0])
    alone = [_alone_s(url, length) - front_end_s for length in LENGTHS]
    lengths, prompt_s, attended_s = fit_prefill(alone, _bursts(url))
    times = StepTimes(lengths, prompt_s, attended_s, 0.0, batches, decode_s, context_s, front_end_s)
    if not colocated:
        return times
    mixed = [(count, _mixed_s(url, count)) for count in MIXED]
    found = StepTimes(
        lengths, prompt_s, attended_s, fit_mixed(times, mixed), batches, decode_s, context_s, front_end_s
    )
    return found


def fit_prefill(
    alone: Sequence[float], bursts: Sequence[tuple[int, int, float]]
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Prompt tokens, their seconds without attention, and the seconds per attended token.

    A prompt as long as a burst of shorter ones takes the longer the more it attends to.

    Parameters
    ----------
    alone : seconds of one prompt of each of LENGTHS
    bursts : (prompts, tokens of each, seconds of their common step)
    """
    lengths = tuple(map(float, LENGTHS))
    more, attended = [], []
    for count, length, seconds in bursts:
        more.append(_linear(count * length, lengths, alone) - seconds)
        attended.append(attended_tokens(count * length) - count * attended_tokens(length))
    slope = max(0.0, float(np.dot(more, attended) / np.dot(attended, attended)))
    # No step may take less than one with fewer tokens.
    bare = (s - slope * attended_tokens(n) for n, s in zip(lengths, alone, strict=True))
    return lengths, tuple(np.maximum.accumulate(np.fromiter(bare, dtype=float)).tolist()), slope


def fit_mixed(times: StepTimes, rows: Sequence[tuple[int, float]]) -> float:
    """Seconds of a decode beside a prompt, from (decodes, seconds of a step of theirs with a prompt)."""
    alone = times.prefill(MIXED_PROMPT, attended_tokens(MIXED_PROMPT))
    counts = np.array([count for count, _ in rows], dtype=float)
    extra = np.array([seconds for _, seconds in rows]) - alone
    extra -= counts * (SHORT + STEPS) * times.context_s
    return max(0.0, float(np.dot(extra, counts) / np.dot(counts, counts)))


def fit_decode(rows: list[tuple[int, int, float]]) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Batch sizes, their seconds without context, and the seconds per token of context."""
    batches, seconds = BATCHES, [s for _, length, s in rows if length == SHORT]
    extra, context = [], []
    for batch, length, found in rows:
        if length != SHORT:
            extra.append(found - float(np.interp(batch, batches, seconds)))
            context.append(batch * (length - SHORT))
    slope = max(0.0, float(np.dot(extra, context) / np.dot(context, context)))
    held = [batch * (SHORT + STEPS / 2) for batch in batches]
    bare = [s - slope * tokens for s, tokens in zip(seconds, held, strict=True)]
    return tuple(map(float, batches)), tuple(bare), slope


def _alone_s(url: str, length: int) -> float:
    """Seconds to the first token of a request that is alone."""
    seen = _run(url, REPEATS, length, 2, at_once=False)
    return float(np.median(seen.first_s - seen.sent_s))


def _bursts(url: str) -> list[tuple[int, int, float]]:
    """(prompts, tokens of each, seconds) of steps with several: the first prompt of a burst runs alone, the
    others run together."""
    found = []
    for count, length in BURSTS:
        first = np.sort(_run(url, count, length, 1, at_once=True).first_s)
        steps = np.split(first, np.flatnonzero(np.diff(first) > TOGETHER_S) + 1)
        found += [(len(step), length, float(step[0] - before[0])) for before, step in pairwise(steps)]
    return found


def _decode_s(url: str, batch: int, length: int) -> float:
    """Seconds of a step: the mean time between tokens, without a twentieth at either end, where not all of
    the batch decodes yet or second tokens still wait for their KV cache."""
    seen = _run(url, batch, length, STEPS, at_once=True)
    gaps = np.sort(np.frombuffer(seen.gap_s, dtype=float))
    edge = -(-len(gaps) // 20)
    return float(gaps[edge:-edge].mean())


def _mixed_s(url: str, decodes: int) -> float:
    """Seconds of a step with a prompt and so many decodes: the longest times between their tokens, while
    prompts come one after the other."""
    at_s = np.concatenate((np.zeros(decodes), MIXED_EVERY_S * np.arange(1, MIXED_PROMPTS + 1)))
    isl = np.repeat([SHORT, MIXED_PROMPT], (decodes, MIXED_PROMPTS))
    # Answers that outlast the prompts, were each step only 10 ms long.
    osl = np.repeat([round(MIXED_EVERY_S * (MIXED_PROMPTS + 1) / 0.01), 1], (decodes, MIXED_PROMPTS))
    seen = measure(Load(url), Requests(at_s, isl, osl, "profile")).seen
    gaps = np.sort(np.frombuffer(seen.gap_s, dtype=float))[-decodes * MIXED_PROMPTS :]
    return float(np.median(gaps))


def _run(url: str, count: int, isl: int, osl: int, at_once: bool) -> Measurements:
    """Send equal requests, all at once or one after the other."""
    asked = Requests(np.zeros(count), np.full(count, isl), np.full(count, osl), "profile")
    return measure(Load(url, max_concurrency=None if at_once else 1), asked).seen


def _linear(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The piecewise linear function through these points, beyond them as between the last two."""
    at = min(max(int(np.searchsorted(xs, x)), 1), len(xs) - 1)
    (x0, x1), (y0, y1) = xs[at - 1 : at + 1], ys[at - 1 : at + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
