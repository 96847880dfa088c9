"""The finalists of a search under perturbed costs: which stays best, what is regretted, which to choose.

Every finalist meets the same perturbations (common random numbers) and, where it is simulated, the same
requests, so that differences between finalists are not those of luck. Replicas, plans, engine settings and
the weights of routes stay as planned: they are what a fleet would run, whatever its costs turn out to be.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Protocol

import numpy as np

from cost_model.base import CostModel
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.promise.cost_errors import ASSUMPTIONS, CostErrors, Perturbation
from hexgen2.promise.finalists import Effort, residents
from hexgen2.promise.keep import with_promise
from hexgen2.promise.planned import planned_req_s
from hexgen2.promise.quick_goodput import quick_goodput
from hexgen2.promise.trial import OutOfTimeError, Trials
from hexgen2.replica import Replica, Stage
from hexgen2.robustness import FinalistRobustness, Measure, Robustness
from hexgen2.search.ties import TOLERANCE, greatest, greatest_first

NOISE = 0.01
"""A finalist that is better by at most this share is no better: as between finalists without errors."""
TENTH = 0.1
FEWEST = 10
"""Fewer perturbations say nothing of a tenth of them: then the best one without errors is chosen."""
_FURTHEST, _NEAREST = 4.0, 0.25
"""Where a search for a goodput begins, at most and at least, over that without errors."""


class StopsEarly(Protocol):
    """When to stop, and what to note on Ctrl-C (see hexgen2.search.stopping)."""

    def out_of_time(self) -> bool: ...

    def interrupt(self) -> None: ...


@dataclass(frozen=True)
class RobustEffort:
    """How closely finalists are looked at.

    Attributes
    ----------
    perturbations, finalists : how many, at most, where values are simulated
    calculated_perturbations, calculated_finalists : the same where formulas give them
    requests, residents, targets : of a run, at least; and at least so many times the requests in the fleet at
        a time; and as many as arrive in so many times the target for the first token
    most : requests of a run
    runs : for each goodput, at most
    """

    perturbations: int = 24
    finalists: int = 6
    calculated_perturbations: int = 200
    calculated_finalists: int = 12
    requests: int = 500
    residents: float = 2.0
    targets: float = 8.0
    most: int = 4000
    runs: int = 5


DEFAULT_EFFORT = RobustEffort()
_AS_IT_IS = Effort(challengers=0, challengers_per_gpu=0)
"""For a promise of exactly the placement that was compared: other engine settings are not tried."""


@dataclass(frozen=True)
class Compared:
    """The finalists that were looked at, the one that is best without errors first, and the record of it;
    `chosen` is an index into both."""

    placements: list[Placement]
    record: Robustness
    chosen: int

    @property
    def placement(self) -> Placement:
        """The chosen one, without the record."""
        return self.placements[self.chosen]


def compare_under_errors(
    placements: Sequence[Placement],
    cluster: Cluster,
    seed: int,
    stopping: StopsEarly,
    effort: RobustEffort = DEFAULT_EFFORT,
    errors: CostErrors | None = None,
    cautious: Sequence[Placement] = (),
) -> Compared:
    """Value finalists under perturbed costs and choose the one whose 10th percentile is best.

    Ended early, what was valued for all finalists counts; after fewer than FEWEST perturbations the first
    placement is chosen.

    Parameters
    ----------
    placements : made for one goal; the first is the best without errors
    errors : instead of those of the placements' cost model on the cluster
    cautious : found for slower costs; half of those that are looked at, beside the first
    """
    first = placements[0]
    errors = errors or CostErrors.of(first.costs(), cluster)
    valuation = _VALUATIONS[first.goal.objective](
        placements, cautious, cluster, seed, effort, stopping.out_of_time
    )
    kept, nominal, rows = list(placements[:1]), [0.0], []
    try:
        if not stopping.out_of_time():
            kept, nominal = valuation.best(stopping)
            for perturbation in errors.draws(cluster, seed, valuation.perturbations):
                if stopping.out_of_time():
                    break
                rows.append(valuation.under(perturbation))
    except OutOfTimeError:
        pass
    except KeyboardInterrupt:
        stopping.interrupt()
    values = np.array(rows, dtype=float).reshape(-1, len(kept))
    chosen = choice(values) if len(values) >= FEWEST else 0
    record = Robustness(
        measure=valuation.measure,
        perturbations=len(values),
        errors=list(errors.stated),
        assumptions=[*ASSUMPTIONS, *valuation.assumptions],
        finalists=_finalists(kept, nominal, values, chosen, valuation) if len(values) else [],
    )
    return Compared(kept, record, chosen)


def with_robust_promise(
    placements: Sequence[Placement],
    cluster: Cluster,
    seed: int,
    stopping: StopsEarly,
    stop_promise: Callable[[], bool],
    effort: RobustEffort = DEFAULT_EFFORT,
    cautious: Sequence[Placement] = (),
) -> Placement:
    """Of the finalists (best first by formulas), the one that fares best under cost errors, with the promise
    that goes with it (see with_promise) and how all of them fare.

    Parameters
    ----------
    stop_promise : whether to end the simulations that choose the best without errors
    cautious : found for slower costs
    """
    best = with_promise(placements, cluster, seed, stop_promise)
    others = [each for each in placements if _layout(each) != _layout(best)]
    known = [_layout(each) for each in (best, *others)]
    unlike = [each for each in cautious if _layout(each) not in known]
    compared = compare_under_errors([best, *others], cluster, seed, stopping, effort, cautious=unlike)
    chosen = compared.placement
    if compared.chosen:
        chosen = with_promise([chosen], cluster, seed, stopping.out_of_time, _AS_IT_IS)
    return chosen.model_copy(update={"robustness": compared.record})


def _layout(placement: Placement) -> list[tuple[str, list[Stage]]]:
    return [(replica.role, replica.stages) for replica in placement.replicas]


def tenth(values: np.ndarray) -> float:
    """What nine of ten values reach or exceed."""
    return float(np.sort(values)[int(len(values) * TENTH)])


def regrets(values: np.ndarray) -> np.ndarray:
    """[draws, finalists] by what share each finalist falls short of the best one under the same
    perturbation; 0 where nothing has a value."""
    best = values.max(axis=1, keepdims=True)
    short = np.where(best > 0, 1 - values / np.where(best > 0, best, 1.0), 0.0)
    return np.where(short > TOLERANCE, short, 0.0)


def choice(values: np.ndarray) -> int:
    """The finalist of the best 10th percentile, and of those the one of the best mean; but the first, where
    that gains no more than the noise."""
    p10 = [tenth(column) for column in values.T]
    means = [math.fsum(column.tolist()) for column in values.T]
    best = greatest(greatest(range(len(p10)), lambda k: p10[k]), lambda k: means[k])[0]
    gains = p10[best] > p10[0] * (1 + NOISE) or (p10[0] == p10[best] and means[best] > means[0] * (1 + NOISE))
    return best if gains else 0


def _finalists(
    placements: Sequence[Placement],
    nominal: Sequence[float],
    values: np.ndarray,
    chosen: int,
    valuation: _Valuation,
) -> list[FinalistRobustness]:
    short, figure = regrets(values), valuation.figure
    best = values >= values.max(axis=1, keepdims=True) / (1 + NOISE)
    return [
        FinalistRobustness(
            replicas=replicas_text(placement.replicas),
            nominal=figure(nominal[k]),
            mean=valuation.mean(values[:, k].tolist()),
            p10=figure(tenth(values[:, k])),
            best_share=float(np.count_nonzero(best[:, k])) / len(values),
            worst_regret=float(short[:, k].max()),
            mean_regret=math.fsum(short[:, k].tolist()) / len(values),
            chosen=k == chosen,
        )
        for k, placement in enumerate(placements)
    ]


def replicas_text(replicas: Sequence[Replica]) -> str:
    """Roles and shapes, such as "prefill 2 x tp2,tp1; decode tp4"."""
    parts = []
    for role, members in groupby(sorted(replicas, key=lambda r: _ROLES.index(r.role)), lambda r: r.role):
        shapes = sorted(replica.shape for replica in members)
        counted = ((shape, len(list(same))) for shape, same in groupby(shapes))
        parts.append(f"{role} " + " + ".join(f"{n} x {s}" if n > 1 else s for s, n in counted))
    return "; ".join(parts)


_ROLES = ("prefill", "decode", "colocated", "mixed")


class _Valuation(ABC):
    """What a placement is worth under some costs: more is better. Simulations raise OutOfTimeError once it is
    time to stop."""

    measure: Measure
    assumptions: tuple[str, ...] = ()
    simulates: ClassVar[bool] = True

    def __init__(
        self,
        placements: Sequence[Placement],
        cautious: Sequence[Placement],
        cluster: Cluster,
        seed: int,
        effort: RobustEffort,
        stop: Callable[[], bool],
    ) -> None:
        self._stop = stop
        self._placements, self._cluster = [*placements, *cautious], cluster
        self._plain = len(placements)
        self._seed, self._effort = seed, effort
        self._costs = placements[0].costs()

    @property
    def perturbations(self) -> int:
        """How many are worth the time."""
        effort = self._effort
        return effort.perturbations if self.simulates else effort.calculated_perturbations

    @abstractmethod
    def best(self, stopping: StopsEarly) -> tuple[list[Placement], list[float]]:
        """The first placement and the best of the others without errors, and what each is worth: they are
        what `under` values."""

    @abstractmethod
    def under(self, perturbation: Perturbation) -> list[float]:
        """What each is worth under a perturbation."""

    def figure(self, value: float) -> float | None:
        """The value as it is written down."""
        return value

    def mean(self, values: list[float]) -> float | None:
        """The mean of values, as it is written down."""
        return math.fsum(values) / len(values)

    def _keep(self, values: list[float], most: int) -> tuple[list[Placement], list[float]]:
        """The first and the best of the others, plain and cautious ones alike."""
        plain = greatest_first(range(1, min(self._plain, len(values))), lambda k: values[k])
        cautious = greatest_first(range(self._plain, len(values)), lambda k: values[k])
        count = max(most - 1 - len(cautious), (most - 1) // 2)
        kept = [0, *plain[:count], *cautious][:most]
        self._placements = [self._placements[k] for k in kept]
        return self._placements, [values[k] for k in kept]


class _Throughput(_Valuation):
    """Requests/s by the formulas: the max flow through these replicas with these plans."""

    measure: Measure = "throughput_req_s"
    simulates = False
    assumptions = ("throughput is the max flow through replicas with the plans that they have",)

    def best(self, stopping: StopsEarly) -> tuple[list[Placement], list[float]]:
        values = planned_req_s(self._placements, self._cluster, self._costs)
        return self._keep(values, self._effort.calculated_finalists)

    def under(self, perturbation: Perturbation) -> list[float]:
        cluster, costs = perturbation.cluster(self._cluster), perturbation.costs(self._costs)
        return planned_req_s(self._placements, cluster, costs)


class _Goodput(_Valuation):
    """The goodput by a few short simulations; formulas say where to begin."""

    measure: Measure = "goodput_req_s"
    assumptions = ("goodput is found by a few short simulations, with the same requests for all finalists",)

    def best(self, stopping: StopsEarly) -> tuple[list[Placement], list[float]]:
        first = self._placements[0]
        rate = first.throughput.req_s
        within = rate * (first.goal.ttft_ms or 0.0) / 1e3
        wanted = max(self._effort.residents * residents(first, rate), self._effort.targets * within)
        self._count = int(min(self._effort.most, max(self._effort.requests, wanted)))
        values: list[float] = []
        tried: list[Placement] = []
        for placement in self._placements:
            if values and stopping.out_of_time():
                break
            tried.append(placement)
            start = rate if values else placement.throughput.req_s
            values.append(self._found(placement, self._cluster, self._costs, start))
        self._placements = tried
        _, self._starts = self._keep(values, self._effort.finalists)
        self._planned = planned_req_s(self._placements, self._cluster, self._costs)
        # Valued as under a perturbation, so that one without errors gives the same.
        return self._placements, self._values(self._cluster, self._costs, self._planned)

    def under(self, perturbation: Perturbation) -> list[float]:
        cluster, costs = perturbation.cluster(self._cluster), perturbation.costs(self._costs)
        return self._values(cluster, costs, planned_req_s(self._placements, cluster, costs))

    def _values(self, cluster: Cluster, costs: CostModel, planned: list[float]) -> list[float]:
        found = []
        for k, placement in enumerate(self._placements):
            ratio = planned[k] / self._planned[k] if self._planned[k] > 0 else 1.0
            start = (self._starts[k] or self._starts[0]) * min(_FURTHEST, max(_NEAREST, ratio))
            found.append(self._found(placement, cluster, costs, start))
        return found

    def _found(self, placement: Placement, cluster: Cluster, costs: CostModel, start: float) -> float:
        if start <= 0:
            return 0.0
        goal = placement.goal
        return quick_goodput(
            Trials(placement, cluster, goal, 2 * self._seed, costs, stop=self._stop),
            goal.attainment,
            start,
            self._count,
            self._effort.runs,
            goal.request_rate or math.inf,
        )


class _Latency(_Valuation):
    """Mean seconds from arrival to the last token at the goal's request_rate; the value is 1 over these, 0
    where the fleet does not keep up."""

    measure: Measure = "mean_e2el_s"
    assumptions = ("latency is that of one short simulation, with the same requests for all finalists",)

    def best(self, stopping: StopsEarly) -> tuple[list[Placement], list[float]]:
        return self._keep(self._values(self._cluster, self._costs), self._effort.finalists)

    def under(self, perturbation: Perturbation) -> list[float]:
        return self._values(perturbation.cluster(self._cluster), perturbation.costs(self._costs))

    def figure(self, value: float) -> float | None:
        return 1 / value if value > 0 else None

    def mean(self, values: list[float]) -> float | None:
        return math.fsum(1 / v for v in values) / len(values) if min(values) > 0 else None

    def _values(self, cluster: Cluster, costs: CostModel) -> list[float]:
        first = self._placements[0]
        rate = first.goal.request_rate
        assert rate is not None
        wanted = self._effort.residents * residents(first, rate)
        count = int(min(self._effort.most, max(self._effort.requests, wanted)))
        values = []
        for placement in self._placements:
            trials = Trials(placement, cluster, placement.goal, self._seed, costs, stop=self._stop)
            trial = trials.run(rate, count, 0)
            values.append(1 / trial.mean_e2el_s if trial.kept_up and trial.whole else 0.0)
        return values


_VALUATIONS: dict[str, type[_Valuation]] = {
    "throughput": _Throughput,
    "goodput": _Goodput,
    "latency": _Latency,
}
