"""Fits the numbers of engines to measured runs of whole servers.

In a closed loop, which requests share a step hardly depends on how long steps take. So the mean times of a
run are nearly linear in the engine's numbers, and a dozen simulations of each run, one for each number, tell
what the times are under any others. The numbers are then found by penalised least squares on the logarithms
of the times: each is drawn towards its start, and runs that the model cannot explain count little (Cauchy's
loss; Hampel and others, Robust Statistics, 1986).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.optimize import least_squares

from cost_model.architecture import WeightType
from cost_model.calibration import five_digits
from cost_model.engines.numbers import EngineFits, EngineNumbers, FittedEngine, HeldOut, HostNumbers
from cost_model.errors import HexGen2Error
from cost_model.registry import CostSource
from hexgen2.estimation.prediction import times_with
from hexgen2.estimation.run import Run
from hexgen2.estimation.runs import effort, in_processes

NUMBERS = tuple(EngineNumbers.model_fields)
FOLDS = 4
_STEP = 0.1
"""Relative change of a number for a derivative."""
_SPREAD = {
    "products": 0.17,
    "prompts": 0.2,
    "decodes": 0.2,
    "latent_prompts": 0.3,
    "latent_decodes": 0.3,
    "experts": 0.2,
    "exchange": 0.25,
    "skew": 0.7,
    "groups": 0.15,
    "elementwise": 0.3,
    "request_us": 1.0,
}
_OTHER_SPREAD = 0.7
_HOST_SPREAD = (0.3, 0.5)
_OF_HOSTS = (("step_us", 0), ("request_us", 0), ("first_token_us", 1), ("first_layer_us", 1))
"""The numbers that hosts change, and which of their two factors does."""
_FORMAT_SPREAD = 0.12
"""Of the logarithms around their start, by judgement: kernels are as measured, hosts are not."""
_TPOT_ERROR, _TTFT_ERROR = 0.1, 0.4
_LARGEST_CHANGE = math.log(18.0)
_LEAST = 1e-6
"""Numbers that are 0 count as this."""
MULTI_TOKEN_MODELS = ("deepseek-v3",)
"""Models whose checkpoints hold heads that predict several tokens at a time (num_nextn_predict_layers)."""
_RELEASE_RUNS = 4
"""Fewest runs of a version and such a model that tell whether it uses them."""
_SPECULATIVE = 1.2
"""Fewest tokens per step that count as such, as a mean over runs with and without it."""
_MOST_TOKENS_PER_STEP = 4.0
_TOKENS_SPREAD = 0.3


@dataclass(frozen=True)
class MeasuredRun:
    """A run with its measured mean times in seconds; `label` names its row."""

    run: Run
    ttft_s: float
    tpot_s: float
    label: str = ""


Release = tuple[str, str]
"""A version of an engine, and a model's name."""


@dataclass(frozen=True)
class LinearTimes:
    """Mean TTFT and TPOT of a run in seconds under some numbers, [2], and how they change with the
    logarithm of each, [2, numbers]."""

    seconds: np.ndarray
    slopes: np.ndarray


def linear_times(run: Run, start: FittedEngine) -> LinearTimes | None:
    """Simulates a run under the start's numbers, and once more for each number that matters; None where it
    cannot be simulated."""
    try:
        seconds = seconds_with(run, start)
        slopes = np.zeros((2, len(NUMBERS)))
        for k, number in enumerate(NUMBERS):
            if _matters(run, number):
                value = getattr(start.numbers, number) * (1 + _STEP)
                numbers = start.numbers.model_copy(update={number: value})
                changed = seconds_with(run, start.model_copy(update={"numbers": numbers}))
                slopes[:, k] = (changed - seconds) / _STEP
    except HexGen2Error:
        return None
    return LinearTimes(seconds, slopes)


def all_linear_times(
    runs: Sequence[Run],
    start: FittedEngine,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[LinearTimes | None]:
    """`linear_times` of each run; of equal ones once, by several processes if there are many.

    Parameters
    ----------
    jobs : processes; None: one per processor
    progress : called with (runs done, runs in all)
    """
    # Long ones first, so that no process is left with one at the end.
    distinct = sorted(dict.fromkeys(runs), key=effort, reverse=True)
    known: dict[Run, LinearTimes | None] = {}
    for run, times in zip(
        distinct, in_processes(partial(linear_times, start=start), distinct, jobs), strict=True
    ):
        known[run] = times
        if progress is not None:
            progress(len(known), len(distinct))
    return [known[run] for run in runs]


def seconds_with(run: Run, fitted: FittedEngine) -> np.ndarray:
    """The mean TTFT and TPOT of a run in seconds, [2], if its engine has these numbers.

    Raises
    ------
    InputError : it cannot be simulated
    """
    fits = EngineFits(source="", engines={run.engine: fitted})
    found = times_with(run, CostSource(run.engine, engines=fits))
    assert found.ttft_ms is not None
    assert found.tpot_ms is not None
    return np.array([found.ttft_ms, found.tpot_ms]) / 1e3


def _matters(run: Run, number: str) -> bool:
    if number in ("experts", "mixture_us"):
        return run.model.experts > 1
    if number == "skew":
        return any(workers.shape.expert_parallel > 1 for workers in run.workers)
    if number == "groups":
        return any(workers.shape.attention_dp > 1 for workers in run.workers)
    if number in ("latent_us", "latent_prompts", "latent_decodes"):
        return run.model.latent is not None
    if number in ("prompts", "decodes"):
        return run.model.latent is None
    if number == "exchange":
        return any(workers.shape.stage_gpus > 1 for workers in run.workers)
    return True


class EngineFit:
    """Runs of one engine as arrays, and the vector that is fitted: the logarithms of the changes of all
    numbers, then of experts in each format, then of each GPU's hosts, then of the tokens per step of each
    release, a version with a model. The default releases are all that may use speculative decoding."""

    def __init__(
        self,
        runs: Sequence[MeasuredRun],
        linear: Sequence[LinearTimes],
        start: FittedEngine,
        prior: FittedEngine | None = None,
        releases: Sequence[Release] | None = None,
    ) -> None:
        release_of = [(measured.run.version, measured.run.model.name) for measured in runs]
        self.releases = list(releases) if releases is not None else _may_speculate(release_of)
        self.release_of = np.array([_place(self.releases, release) for release in release_of])
        self.gpus = sorted({measured.run.gpu.name for measured in runs})
        self.gpu_of = np.array([self.gpus.index(measured.run.gpu.name) for measured in runs])
        formats = [run.run.model.weight_type for run in runs]
        mixtures = {run.run.model.weight_type for run in runs if run.run.model.experts > 1}
        self.formats: list[WeightType] = sorted(mixtures)
        # Runs of dense models count as of the first format; their times do not depend on experts.
        self.format_of = np.array([self.formats.index(kind) if kind in mixtures else 0 for kind in formats])
        self.seconds = np.array([times.seconds for times in linear])
        self.slopes = np.array([times.slopes for times in linear])
        self.log_measured = np.log([[measured.ttft_s, measured.tpot_s] for measured in runs])
        of_numbers = [_SPREAD.get(number, _OTHER_SPREAD) for number in NUMBERS]
        of_formats = [_FORMAT_SPREAD] * len(self.formats)
        of_hosts, of_releases = _HOST_SPREAD * len(self.gpus), [_TOKENS_SPREAD] * len(self.releases)
        self.spread = np.array([*of_numbers, *of_formats, *of_hosts, *of_releases])
        self.tokens = np.exp(self.split(self._logs(start))[3])
        self.away = self._logs(start) - self._logs(start if prior is None else prior)

    def _logs(self, fitted: FittedEngine) -> np.ndarray:
        """The vector that makes these numbers of ones."""
        hosts = [fitted.hosts.get(gpu, HostNumbers()) for gpu in self.gpus]
        known = [
            *(getattr(fitted.numbers, number) for number in NUMBERS),
            *(fitted.experts.get(kind, 1.0) for kind in self.formats),
            *(number for host in hosts for number in (host.steps, host.first_token)),
            *(fitted.speculative.get(version, {}).get(model, 1.0) for version, model in self.releases),
        ]
        return np.log(np.maximum(known, _LEAST))

    def split(self, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The vector's parts: [numbers], [formats], [gpus, 2], [releases]."""
        ends = np.cumsum([len(NUMBERS), len(self.formats), 2 * len(self.gpus)])
        numbers, formats, hosts, releases = np.split(logs, ends)
        return numbers, formats, hosts.reshape(-1, 2), releases

    def predicted(self, logs: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Seconds of some runs, [runs, 2]."""
        numbers, formats, of_gpus, of_releases = self.split(logs)
        hosts = of_gpus[self.gpu_of[at]]
        changes = np.tile(numbers, (len(hosts), 1))
        if len(formats):
            changes[:, NUMBERS.index("experts")] += formats[self.format_of[at]]
        for number, which in _OF_HOSTS:
            changes[:, NUMBERS.index(number)] += hosts[:, which]
        linear = self.seconds[at] + np.einsum("rtk,rk->rt", self.slopes[at], np.exp(changes) - 1)
        # Runs of no release have the place -1: that of the 1 at the end.
        linear[:, 1] /= np.append(np.exp(of_releases), 1.0)[self.release_of[at]]
        return np.asarray(np.maximum(linear, 1e-6))

    def found(self, at: np.ndarray) -> np.ndarray:
        """The vector that fits some runs best."""

        def residuals(logs: np.ndarray) -> np.ndarray:
            off = (np.log(self.predicted(logs, at)) - self.log_measured[at]) / (_TTFT_ERROR, _TPOT_ERROR)
            robust = np.sign(off) * np.sqrt(np.log1p(off**2))
            return np.concatenate([robust.ravel(), (logs + self.away) / self.spread])

        start = np.zeros(len(self.spread))
        most = np.full(len(start), _LARGEST_CHANGE)
        least = -most
        if len(self.releases):
            least[-len(self.releases) :] = -np.log(self.tokens) - 1e-9
            most[-len(self.releases) :] = np.log(np.maximum(_MOST_TOKENS_PER_STEP / self.tokens, 1 + 1e-9))
        return np.asarray(least_squares(residuals, start, bounds=(least, most), max_nfev=60).x)

    def errors(self, labels: Sequence[str]) -> np.ndarray:
        """The relative error of each run's TPOT by a fit to the runs with other labels; nan if there are
        none."""
        named, found = np.array(labels), np.full(len(labels), np.nan)
        for label in np.unique(named):
            out = named == label
            if not out.all():
                predicted = self.predicted(self.found(np.flatnonzero(~out)), np.flatnonzero(out))
                found[out] = np.abs(predicted[:, 1] / np.exp(self.log_measured[out, 1]) - 1)
        return found


def fit_engine(
    runs: Sequence[MeasuredRun],
    linear: Sequence[LinearTimes | None],
    start: FittedEngine,
    seed: int = 0,
    prior: FittedEngine | None = None,
) -> FittedEngine:
    """One engine's numbers that fit its runs best, with errors of runs left out of the fit.

    Parameters
    ----------
    runs : of one engine
    linear : of each run, under the start's numbers; runs without are left out
    start : its hosts of GPUs without runs, and its releases, are kept
    seed : of the choice of runs that are left out together
    prior : what the numbers are drawn towards; None: the start

    Raises
    ------
    HexGen2Error : none of the runs can be simulated
    """
    pairs = [(run, times) for run, times in zip(runs, linear, strict=True) if times is not None]
    if not pairs:
        raise HexGen2Error("none of the runs can be simulated")
    kept, times = [run for run, _ in pairs], [times for _, times in pairs]
    fit = EngineFit(kept, times, start, prior)
    every = np.arange(len(kept))
    tokens = fit.tokens * np.exp(fit.split(fit.found(every))[3])
    fast = [release for release, k in zip(fit.releases, tokens, strict=True) if k >= _SPECULATIVE]
    fit = EngineFit(kept, times, start, prior, fast)
    logs = fit.found(every)
    order = np.random.default_rng(seed).permutation(len(kept))
    by_rows = fit.errors([str(place % FOLDS) for place in order])
    by_model = fit.errors([run.run.model.name for run in kept])
    by_gpu = fit.errors([run.run.gpu.name for run in kept])
    changes, experts, of_hosts, of_releases = (np.exp(part) for part in fit.split(logs))
    numbers = {
        number: five_digits(getattr(start.numbers, number) * float(change))
        for number, change in zip(NUMBERS, changes, strict=True)
    }
    hosts, factors = dict(start.hosts), dict(start.experts)
    for kind, factor in zip(fit.formats, experts, strict=True):
        factors[kind] = five_digits(factors.get(kind, 1.0) * float(factor))
    for k, (gpu, change) in enumerate(zip(fit.gpus, of_hosts, strict=True)):
        here, before = fit.gpu_of == k, start.hosts.get(gpu, HostNumbers())
        hosts[gpu] = HostNumbers(
            steps=five_digits(before.steps * float(change[0])),
            first_token=five_digits(before.first_token * float(change[1])),
            rows=int(here.sum()),
            error=_mean(by_rows[here]),
        )
    speculative = {version: dict(models) for version, models in start.speculative.items()}
    for (version, model), k in zip(fit.releases, fit.tokens * of_releases, strict=True):
        speculative.setdefault(version, {})[model] = five_digits(max(1.0, float(k)))
    return FittedEngine(
        versions=_versions(kept),
        numbers=EngineNumbers(**numbers),
        experts=factors,
        hosts=hosts,
        speculative=speculative,
        rows=len(kept),
        held_out=HeldOut(rows=_mean(by_rows), model=_mean(by_model), gpu=_mean(by_gpu)),
    )


def _may_speculate(release_of: Sequence[Release]) -> list[Release]:
    """The releases with enough runs of a model that can."""
    counts = Counter(release_of)
    return sorted(
        (version, model)
        for (version, model), count in counts.items()
        if version and model in MULTI_TOKEN_MODELS and count >= _RELEASE_RUNS
    )


def _place(releases: Sequence[Release], release: Release) -> int:
    return releases.index(release) if release in releases else -1


def _mean(errors: np.ndarray) -> float | None:
    """The mean of those that are numbers, each counted as at most 1: one run that a model is far from
    explaining says nothing about the others."""
    known = errors[~np.isnan(errors)]
    return five_digits(float(np.minimum(known, 1.0).mean())) if len(known) else None


def _versions(runs: Sequence[MeasuredRun]) -> str:
    """The oldest and newest of the versions that are numbers."""
    known = sorted(
        {tuple(int(part) for part in parts[:2]) for run in runs if (parts := _numeric(run.run.version))}
    )
    if not known:
        return ""
    first, last = (".".join(map(str, version)) for version in (known[0], known[-1]))
    return first if first == last else f"{first} to {last}"


def _numeric(version: str) -> list[str]:
    parts = version.split(".")
    return parts[:2] if len(parts) >= 2 and all(part.isdigit() for part in parts[:2]) else []
