"""Measure the step times of a launched replica with a few requests through its API, and make a cost model of
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

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
SHORT, STEPS, REPEATS = 16, 40, 2
SPEED_LENGTHS, SPEED_BATCHES = (96, 160, 256), (2, 4, 8)
ROUNDS = 3
"""Everything is measured so many times, in turns there and back, since a machine's speed drifts."""
BESIDE_LENGTHS, BESIDE_BATCHES, BESIDE_PROMPT = (96, 160, 256), (2, 6, 12), 160
"""Prompts and batches that are measured with and without the other replica at work."""
BESIDE_DECODES, BESIDE_S, BESIDE_STEPS = 4, 0.4, 200
"""Requests that decode beside prompts; what is to disturb begins after so long; outputs of a batch beside
prompts."""
WAITS = 2.5
"""A token that comes after so many usual times between tokens has waited for something else than its step."""
TOGETHER_S = 0.01
"""First tokens less than this apart come from the same step."""


Kind = TypeVar("Kind")


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

    def scaled(self, prompt: float, decode: float) -> StepTimes:
        """Prompts and decodes that take so many times as long."""
        return replace(
            self,
            prompt_s=tuple(s * prompt for s in self.prompt_s),
            attended_s=self.attended_s * prompt,
            mixed_decode_s=self.mixed_decode_s * decode,
            decode_s=tuple(s * decode for s in self.decode_s),
            context_s=self.context_s * decode,
        )

    def mixed(self, tokens: float, attended: float, requests: float, context: float) -> float:
        """Seconds of a step with both: less than the two steps, since it reads the weights once."""
        of_decodes = requests * self.mixed_decode_s + context * self.context_s
        return self.prefill(tokens, attended) + of_decodes


@dataclass(frozen=True)
class Contention:
    """How much longer a step takes while the other replica of a pair is at work: both share the machine's
    memory, caches and cores."""

    prompt: float
    decode: float

    def slowed(self, times: StepTimes, prefilling: float, decoding: float) -> StepTimes:
        """The step times where prefill and decode replica are at work for these shares of the time."""
        return times.scaled(1 + (self.prompt - 1) * decoding, 1 + (self.decode - 1) * prefilling)


@dataclass(frozen=True)
class Speed:
    """Seconds of a few prompts and of a few decode steps: how fast the machine is right now."""

    prompt_s: float
    decode_s: float

    def __str__(self) -> str:
        return f"{1e3 * self.prompt_s:.0f} + {1e3 * self.decode_s:.1f} ms"

    @classmethod
    def now(cls, url: str, front_end_s: float) -> Speed:
        """Measure it, in a few seconds."""
        prompts = [_alone_s(url, length) - front_end_s for length in SPEED_LENGTHS]
        return cls(sum(prompts), sum(_decode_s(url, batch, SHORT) for batch in SPEED_BATCHES))

    def over(self, before: Speed, after: Speed, times: StepTimes) -> StepTimes:
        """Step times that were measured at this speed, at the mean of two others."""
        prompt = (before.prompt_s + after.prompt_s) / 2 / self.prompt_s
        decode = (before.decode_s + after.decode_s) / 2 / self.decode_s
        return times.scaled(prompt, decode)


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
    _run(url, max(BATCHES), SHORT, STEPS, at_once=True)  # Warms caches, buffers and clocks up.
    kinds = [*((batch, SHORT) for batch in BATCHES), *CONTEXTS]
    decodes = _in_turns(kinds, lambda kind: _decode_s(url, *kind))
    batches, decode_s, context_s = fit_decode([(*kind, s) for kind, s in decodes.items()])
    waits = _in_turns((1, *LENGTHS), lambda length: _alone_s(url, length))
    # A prompt of one token takes the step of one decode, so the rest is the front end.
    front_end_s = max(0.0, waits[1] - decode_s[0])
    alone = [waits[length] - front_end_s for length in LENGTHS]
    lengths, prompt_s, attended_s = fit_prefill(alone, _bursts(url))
    times = StepTimes(lengths, prompt_s, attended_s, 0.0, batches, decode_s, context_s, front_end_s)
    if not colocated:
        return times
    mixed = list(_in_turns(MIXED, lambda count: _mixed_s(url, count)).items())
    found = StepTimes(
        lengths, prompt_s, attended_s, fit_mixed(times, mixed), batches, decode_s, context_s, front_end_s
    )
    return found


def contention(url: str, times: StepTimes) -> Contention:
    """How the two replicas of a pair disturb each other: prompts one after the other while others decode, and
    decodes while prompts come as fast as they are computed. KV caches move meanwhile, as they do in use."""

    def prompt_ratio(length: int) -> float:
        alone_s = _alone_s(url, length)
        at_s = np.zeros(BESIDE_DECODES), BESIDE_S + 1.5 * alone_s * np.arange(2 * REPEATS)
        osl = (round((at_s[1][-1] + 2 * alone_s) / times.decode_s[0]), 2)
        first_s = _both(url, at_s, (SHORT, length), osl)[BESIDE_DECODES:]
        return float(np.median(first_s)) / alone_s

    def decode_ratio(batch: int) -> float:
        prompt_s = times.prefill(BESIDE_PROMPT, attended_tokens(BESIDE_PROMPT))
        count = int(BESIDE_STEPS * times.decode(batch, 0.0) / prompt_s)
        asked = Requests(np.zeros(batch), np.full(batch, SHORT), np.full(batch, BESIDE_STEPS), "profile")
        alone_s = _step_s(np.frombuffer(measure(Load(url), asked).seen.gap_s, dtype=float))
        at_s = np.zeros(batch), BESIDE_S + prompt_s * np.arange(count)
        gaps: list[float] = []
        _both(url, at_s, (SHORT, BESIDE_PROMPT), (BESIDE_STEPS, 2), gaps)
        return _step_s(np.array(gaps)) / alone_s

    prompts = _in_turns(BESIDE_LENGTHS, prompt_ratio).values()
    decodes = _in_turns(BESIDE_BATCHES, decode_ratio).values()
    return Contention(max(1.0, float(np.median(list(prompts)))), max(1.0, float(np.median(list(decodes)))))


def _both(
    url: str,
    at_s: tuple[np.ndarray, np.ndarray],
    isl: tuple[int, int],
    osl: tuple[int, int],
    gaps: list[float] | None = None,
) -> np.ndarray:
    """Send requests of two kinds; seconds to the first token of each, and the times between tokens."""
    counts = [len(each) for each in at_s]
    asked = Requests(np.concatenate(at_s), np.repeat(isl, counts), np.repeat(osl, counts), "profile")
    seen = measure(Load(url), asked).seen
    if gaps is not None:
        gaps += np.frombuffer(seen.gap_s, dtype=float).tolist()
    return seen.first_s - seen.sent_s


def _in_turns(kinds: Sequence[Kind], measured: Callable[[Kind], float]) -> dict[Kind, float]:
    """The median of ROUNDS measurements of each kind, in order, in reverse, and so on."""
    found: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS):
        for kind in kinds if turn % 2 == 0 else reversed(kinds):
            found[kind].append(measured(kind))
    return {kind: float(np.median(values)) for kind, values in found.items()}


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
    """Seconds of a step of a batch."""
    return _step_s(np.frombuffer(_run(url, batch, length, STEPS, at_once=True).gap_s, dtype=float))


def _step_s(gaps: np.ndarray) -> float:
    """Seconds of a decode step: the mean time between tokens, without the first ones, which wait for the
    prompts of others (a colocated replica computes them in the same steps) or for their KV cache."""
    return float(gaps[gaps < WAITS * np.median(gaps)].mean())


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
