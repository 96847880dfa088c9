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

import itertools
import math

from cost_model.portable import exp
from hexgen2.search.planning.timing import Timing


class MixedSteps:
    """Which stages of a pipeline have a mixed step at a time: a Markov chain, in which a share of all steps
    is mixed.

    Parameters
    ----------
    share : of the steps that are mixed, less than 1 or 1
    prompts : in a mixed step
    stages : of the pipeline
    """

    def __init__(self, share: float, prompts: float, stages: int) -> None:
        self.share, self.stages = share, stages
        memory = (1 - exp(-share * prompts)) / share
        memory = 1 - memory if 0 < share < 1 else 0.0
        self.next = 1 - share + share * memory
        """The chance that a stage's step is not mixed if that of the stage before it is not."""
        self.most = max(self.next, 1 - share + share * memory**2)
        """The same for any stage before it, at most."""

    @property
    def none(self) -> float:
        """The chance that no stage has a mixed step."""
        return (1 - self.share) * float(self.next) ** (self.stages - 1)

    def none_of(self, count: int) -> float:
        """The most that the chance can be that none of so many stages has one."""
        return self.none if count == self.stages else (1 - self.share) * self.most ** (count - 1)


def least_period_s(mixed: Timing, rest: Timing, layers: int, steps: MixedSteps) -> float:
    """The least mean seconds from one step to the next, of which a share is mixed, however the layers are
    divided."""
    share, stages = steps.share, steps.stages
    mean = rest.times(1 - share).plus(mixed, share)
    least_s = least_step_s(mean, layers)
    if stages == 1 or share == 1:
        return least_s
    beta, work = _least_ratio(mixed, rest), _work(mixed, rest, layers)
    speeds = itertools.accumulate(1 / a for a in sorted(mixed.layer_s))
    theta = min(
        (1 - steps.none_of(count) + beta * steps.none) / speed for count, speed in enumerate(speeds, 1)
    )
    return max(least_s, theta * work)


def least_step_s(timing: Timing, layers: int) -> float:
    """The least seconds from one step to the next where all are like this one: those of stages that all take
    the same time, and of as many steps in flight as there are stages."""
    walk = layers * min(timing.layer_s) + math.fsum((*timing.edge_s, *timing.hop_s))
    return max(1 / timing.most_steps_s(layers), walk / len(timing.layer_s))


def least_decodes_s(mixed: Timing, rest: Timing, layers: int, steps: MixedSteps) -> float:
    """The least seconds from one step to the next if none were mixed, on a straight line from steps that are
    all mixed, through those of which a share is: (mean - share all mixed) / (1 - share). Without hops, that
    is the mean of those periods in which the stage that is slowest in mixed steps has none."""
    alone_s = least_step_s(rest, layers)
    if steps.stages == 1:
        return alone_s
    beta, work = _least_ratio(mixed, rest), _work(mixed, rest, layers)
    none = float(steps.next) ** (steps.stages - 1)
    even_s = work / math.fsum(1 / a for a in mixed.layer_s)
    found = math.inf
    for slowest in sorted(set(mixed.layer_s)):
        others = sorted(mixed.layer_s)
        others.remove(slowest)
        speeds = itertools.accumulate(1 / a for a in others)
        theta = min(
            (1 - (none if count == len(others) else steps.most**count)) / speed
            for count, speed in enumerate(speeds, 1)
        )
        # The slowest stage takes at least even_s; the longer it takes, the less is left for the others.
        grows = beta * none - theta / slowest
        least_s = beta * none * even_s + theta * (work - even_s / slowest)
        if grows < 0:
            least_s = beta * max(even_s, theta * work / (beta - grows))
        found = min(found, max(least_s, beta * even_s))
    # Hops make steps that are all mixed longer than their slowest stage by no more than this.
    longer_s = max(math.fsum(mixed.hop_s) / steps.stages, *mixed.hop_s)
    return max(alone_s, found - steps.share / (1 - steps.share) * longer_s)


def _least_ratio(mixed: Timing, rest: Timing) -> float:
    """The least of a decode step's seconds per layer to those of a mixed step."""
    return min(min(1.0, b / a) for a, b in zip(mixed.layer_s, rest.layer_s, strict=True))


def _work(mixed: Timing, rest: Timing, layers: int) -> float:
    """The sum of y_k / a_k, with no more beside the layers than decode steps have, too."""
    beta = _least_ratio(mixed, rest)
    edges = zip(mixed.layer_s, mixed.edge_s, rest.edge_s, strict=True)
    return layers + math.fsum(min(e, d / beta) / a for a, e, d in edges)
