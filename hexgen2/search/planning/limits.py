"""What no division of a pipeline's layers exceeds, without looking at divisions.

Let y_k = a_k n_k + e_k be the seconds of stage k with n_k layers in a mixed step (one that also has prompts),
and b_k those of a layer in a decode step. However the layers are divided, the sum of y_k / a_k is that of all
layers and of e_k / a_k.

Steps in successive stages wait for the slowest of them (cost_model/pipeline.py, mixed_period_s). Let M be the
stages whose step is mixed at a time, and beta the least b_k / a_k. A period takes the largest y_k of M, and
where M is empty at least beta times the largest of all. Let g(j) be the most that the chance can be that none
of j stages is in M. Then

    mean period >= sum of w_k y_k   with   w_k = theta / a_k

holds up to theta = min over j of (1 - g(j) + beta g(all)) / (sum of the j largest 1 / a_k): such weights lie
in the base polytope of a submodular function (Edmonds, 1970) whose value depends only on how many stages a
set has. Equal stages with equal layers reach this limit.

All of this is for one number of decodes in a step. Where a step's time jumps with its tokens (tiles), fewer
decodes may be a little more efficient; the planner takes as many as there is memory for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np

from cost_model.portable import exps
from hexgen2.search.planning.timing import Timings


class MixedSteps:
    """Which stages of n pipelines have a mixed step at a time: Markov chains, in which a share of steps is
    mixed.

    Parameters
    ----------
    share : [n] of the steps that are mixed, at most 1
    prompts : [n] in a mixed step
    stages : [n] of the pipelines

    Attributes
    ----------
    memory : [n] how much of what a step was is known of that in the next stage
    next : [n] the chance that a stage's step is not mixed if that of the stage before it is not
    most : [n] the same for any stage before it, at most
    none : [n] the chance that no other stage has a mixed step if one has none
    """

    def __init__(self, share: np.ndarray, prompts: np.ndarray, stages: np.ndarray) -> None:
        self.share, self.stages = share, stages
        with np.errstate(divide="ignore", invalid="ignore"):
            memory = 1 - (1 - exps(-share * prompts)) / share
        self.memory = memory = np.where((share > 0) & (share < 1), memory, 0.0)
        self.next = 1 - share + share * memory
        self.most = np.maximum(self.next, 1 - share + share * (memory * memory))
        self.none = _powers(self.next, int(stages.max()))[np.arange(len(stages)), stages - 1]

    def only(self, which: np.ndarray) -> MixedSteps:
        """Those of these pipelines."""
        some = copy.copy(self)
        vars(some).update({name: each[which] for name, each in vars(self).items()})
        return some


def _powers(base: np.ndarray, count: int) -> np.ndarray:
    """[n, count] the powers of [n] numbers from 0 on, by multiplication, which rounds alike everywhere."""
    factors = np.repeat(base[:, None], count, axis=1)
    factors[:, 0] = 1.0
    return np.asarray(np.cumprod(factors, axis=1))


def least_period_s(mixed: Timings, rest: Timings, layers: int, steps: MixedSteps) -> np.ndarray:
    """[n] the least mean seconds from one step to the next, of which a share is mixed, however the layers are
    divided."""
    share = steps.share
    least_s = least_step_s(rest.mean(mixed, share), layers)
    beta, work = _least_ratio(mixed, rest), _work(mixed, rest, layers)
    none = (1 - share) * steps.none
    for stages, rows in _by_stages(steps.stages):
        # The most that the chance can be that none of so many stages has a mixed step.
        none_of = (1 - share[rows])[:, None] * _powers(steps.most[rows], stages)
        none_of[:, -1] = none[rows]
        speeds = np.cumsum(1 / np.sort(mixed.layer_s[rows, :stages], axis=1), axis=1)
        theta = ((1 - none_of + (beta * none)[rows, None]) / speeds).min(axis=1)
        found = np.maximum(least_s[rows], theta * work[rows])
        least_s[rows] = np.where(share[rows] < 1, found, least_s[rows])
    return least_s


def mean_period_s(mixed: Timings, rest: Timings, split: np.ndarray, steps: MixedSteps) -> np.ndarray:
    """[n] the mean seconds from one step to the next with [n, s] layers (cost_model/pipeline.py,
    mixed_period_s)."""
    mixed_s, rest_s, share = mixed.stage_s(split), rest.stage_s(split), steps.share
    hop_s = rest.mean(mixed, share).hop_s
    walk_s = share * _sum(mixed_s) + (1 - share) * _sum(rest_s) + _sum(hop_s)
    slowest_s = share * mixed_s[:, 0] + (1 - share) * rest_s[:, 0]
    for stages in range(2, mixed_s.shape[1] + 1):
        rows = np.flatnonzero(steps.stages == stages)
        if len(rows):
            here = mixed_s[rows, :stages], rest_s[rows, :stages].max(axis=1)
            slowest_s[rows] = _mean_slowest_s(*here, share[rows], steps.memory[rows])
    return np.maximum(np.maximum(slowest_s, walk_s / steps.stages), hop_s.max(axis=1))


def _mean_slowest_s(
    mixed_s: np.ndarray, least_s: np.ndarray, share: np.ndarray, memory: np.ndarray
) -> np.ndarray:
    """[n] the mean of the slowest of several stages, which takes least_s [n] where no step is mixed."""
    mean, below = np.zeros(len(mixed_s)), np.zeros(len(mixed_s))
    levels = np.sort(np.maximum(mixed_s, least_s[:, None]), axis=1)
    for level_s in (least_s, *levels.T):
        within, remembered = np.ones(len(mixed_s)), np.zeros(len(mixed_s))
        for stage_s in mixed_s.T:
            remembered = remembered * memory
            slower = stage_s > level_s
            within = np.where(slower, within * (1 - share + share * remembered), within)
            remembered = np.where(slower, 1.0, remembered)
        mean += (within - below) * level_s
        below = within
    return mean


def least_step_s(timings: Timings, layers: int) -> np.ndarray:
    """[n] the least seconds from one step to the next where all are like this one: those of stages that all
    take the same time, and of as many steps in flight as there are stages."""
    inverse = 1 / timings.layer_s
    even_s = (layers + _sum(timings.edge_s * inverse)) / _sum(inverse)
    walk_s = layers * timings.layer_s.min(axis=1) + _sum(timings.edge_s) + _sum(timings.hop_s)
    return np.maximum(np.maximum(even_s, timings.hop_s.max(axis=1)), walk_s / timings.stages)


def least_decodes_s(mixed: Timings, rest: Timings, layers: int, steps: MixedSteps) -> np.ndarray:
    """[n] the least seconds from one step to the next if none were mixed, on a straight line from steps that
    are all mixed, through those of which a share is: (mean - share all mixed) / (1 - share). Without hops,
    that is the mean of those periods in which the stage that is slowest in mixed steps has none."""
    found, stages = least_step_s(rest, layers), steps.stages
    beta, work = _least_ratio(mixed, rest), _work(mixed, rest, layers)
    even_s = work / _sum(1 / mixed.layer_s)
    of_each = beta, work, steps.none, even_s, steps.most
    # Hops make steps that are all mixed longer than their slowest stage by no more than this.
    longer_s = np.maximum(_sum(mixed.hop_s) / stages, mixed.hop_s.max(axis=1))
    longer_s = steps.share / (1 - steps.share) * longer_s
    for count, rows in _by_stages(stages):
        line_s = _least_line_s(mixed.layer_s[rows, :count], *(each[rows] for each in of_each))
        found[rows] = np.maximum(found[rows], line_s - longer_s[rows])
    return found


def _least_line_s(
    layer_s: np.ndarray,
    beta: np.ndarray,
    work: np.ndarray,
    none: np.ndarray,
    even_s: np.ndarray,
    most: np.ndarray,
) -> np.ndarray:
    """[n] of `least_decodes_s`, for pipelines that all have s stages and no hops; [n, s] layer_s are those in
    mixed steps."""
    slowest_first, stages = np.sort(layer_s, axis=1), layer_s.shape[1]
    none_of = _powers(most, stages)[:, 1:]
    none_of[:, -1] = none
    found = np.full(len(layer_s), np.inf)
    for k in range(stages):
        slowest, others = slowest_first[:, k], np.delete(slowest_first, k, axis=1)
        theta = ((1 - none_of) / np.cumsum(1 / others, axis=1)).min(axis=1)
        # The slowest stage takes at least even_s; the longer it takes, the less is left for the others.
        grows = beta * none - theta / slowest
        least_s = beta * none * even_s + theta * (work - even_s / slowest)
        less = grows < 0
        shorter_s = beta[less] * np.maximum(even_s[less], (theta * work)[less] / (beta - grows)[less])
        least_s[less] = shorter_s
        found = np.minimum(found, np.maximum(least_s, beta * even_s))
    return found


def _by_stages(stages: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The rows of pipelines with so many stages each, where there are several."""
    for count in sorted(set(stages.tolist())):
        if count > 1:
            yield count, np.flatnonzero(stages == count)


def _sum(values: np.ndarray) -> np.ndarray:
    """[n] sums of [n, s] values, in order: numpy's own order depends on the processor."""
    return np.asarray(np.cumsum(values, axis=1)[:, -1])


def _least_ratio(mixed: Timings, rest: Timings) -> np.ndarray:
    """[n] the least of a decode step's seconds per layer to those of a mixed step."""
    return np.minimum(1.0, (rest.layer_s / mixed.layer_s).min(axis=1))


def _work(mixed: Timings, rest: Timings, layers: int) -> np.ndarray:
    """[n] the sum of y_k / a_k, with no more beside the layers than decode steps have, too."""
    beta = _least_ratio(mixed, rest)[:, None]
    return layers + _sum(np.minimum(mixed.edge_s, rest.edge_s / beta) / mixed.layer_s)
