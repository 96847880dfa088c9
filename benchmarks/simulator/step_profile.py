"""Measure the step times of a launched replica with a few requests through its API, and make a cost model of
them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from cost_model.architecture import ModelArchitecture
from cost_model.base import TensorGroup, Work
from cost_model.calibrated import Calibrated
from cost_model.lengths import RequestLengths, attended_tokens
from hexgen2.bench.measurements import Measurements
from hexgen2.bench.run import Load, measure
from hexgen2.workload.requests import Requests

LENGTHS = (16, 64, 128, 256, 512)
BURSTS = ((9, 64), (9, 128), (7, 256))
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""Every small size, because a matrix product of 3 rows can take longer than one of 4."""
CONTEXTS = ((4, 384), (8, 256))
SHORT, STEPS, REPEATS = 16, 40, 5
TOGETHER_S = 0.01
"""First tokens less than this apart come from the same step."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of steps.

    prompt_step_s, prompt_token_s, prompt_attended_s, prompt_s : a prefill step takes the first, plus the
        others for each of its tokens, for each token that these attend to, and for each prompt
    batches, decode_s : seconds of a decode step without context, by batch size; linear between and beyond
    context_s : seconds per token of context
    front_end_s : what a request costs outside the workers
    """

    prompt_step_s: float
    prompt_token_s: float
    prompt_attended_s: float
    prompt_s: float
    batches: tuple[float, ...]
    decode_s: tuple[float, ...]
    context_s: float
    front_end_s: float

    def prefill(self, prompts: float, tokens: float, attended: float) -> float:
        """Seconds of a prefill step."""
        of_tokens = tokens * self.prompt_token_s + attended * self.prompt_attended_s
        return self.prompt_step_s + prompts * self.prompt_s + of_tokens

    def decode(self, requests: float, context: float) -> float:
        """Seconds of a decode step."""
        at = min(max(int(np.searchsorted(self.batches, requests)), 1), len(self.batches) - 1)
        (x0, x1), (y0, y1) = self.batches[at - 1 : at + 1], self.decode_s[at - 1 : at + 1]
        return y0 + (y1 - y0) * (requests - x0) / (x1 - x0) + context * self.context_s


class Profiled(Calibrated):
    """Step times of replicas with one worker each, from a profile; memory and bytes as in the default
    model."""

    name = "profiled"

    def __init__(self, model: ModelArchitecture, lengths: RequestLengths, times: StepTimes) -> None:
        super().__init__(model, lengths)
        self.times = times

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        seconds = 0.0
        if work.prompt_tokens:
            seconds += self.times.prefill(
                work.sampled - work.decodes, work.prompt_tokens, work.prompt_attended
            )
        if work.decodes:
            seconds += self.times.decode(work.decodes, work.context)
        return seconds / self.model.layers

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        return 0.0


def profile(url: str) -> StepTimes:
    """Profile a fleet of one route, while it serves nothing else."""
    front_end_s, step_s, token_s, attended_s, prompt_s = fit_prefill(url).tolist()
    decodes = [(batch, SHORT, _decode_s(url, batch, SHORT)) for batch in BATCHES]
    decodes += [(batch, length, _decode_s(url, batch, length)) for batch, length in CONTEXTS]
    return StepTimes(step_s, token_s, attended_s, prompt_s, *fit_decode(decodes), front_end_s)


def fit_prefill(url: str) -> np.ndarray:
    """[5] seconds of: front end, step, token, attended token, prompt; a least-squares fit of relative errors.

    A single prompt shows the costs of its step and of the front end; of a burst, the first prompt runs alone
    and the rest run together.
    """
    rows, seconds = [], []
    for length in LENGTHS:
        seen = _run(url, REPEATS, length, 2, at_once=False)
        rows.append((1, 1, length, attended_tokens(length, None), 1))
        seconds.append(float(np.median(seen.first_s - seen.sent_s)))
    for count, length in BURSTS:
        seen = _run(url, count, length, 2, at_once=True)
        first = np.sort(seen.first_s)
        steps = np.split(first, np.flatnonzero(np.diff(first) > TOGETHER_S) + 1)
        for before, step in pairwise(steps):
            together = len(step)
            rows.append((0, 1, together * length, together * attended_tokens(length, None), together))
            seconds.append(float(step[0] - before[0]))
    relative = np.array(rows, dtype=float) / np.array(seconds)[:, None]
    return nnls(relative, np.ones(len(seconds)))[0]


def _decode_s(url: str, batch: int, length: int) -> float:
    """Seconds of a step: the mean time between tokens, without a twentieth at either end, where not all of
    the batch decodes yet or second tokens still wait for their KV cache."""
    seen = _run(url, batch, length, STEPS, at_once=True)
    gaps = np.sort(np.frombuffer(seen.gap_s, dtype=float))
    edge = -(-len(gaps) // 20)
    return float(gaps[edge:-edge].mean())


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


def _run(url: str, count: int, isl: int, osl: int, at_once: bool) -> Measurements:
    """Send equal requests, all at once or one after the other."""
    asked = Requests(np.zeros(count), np.full(count, isl), np.full(count, osl), "profile")
    return measure(Load(url, max_concurrency=None if at_once else 1), asked).seen
