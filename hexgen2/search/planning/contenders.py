"""Which pipelines may be the best plan of their group, by limits on what they can do: of many groups at once,
in a fraction of the time that it takes to plan them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cost_model.base import Phase
from cost_model.pipeline import micro_batch, mixed_steps, prefill_batches_held, prompts_held
from cost_model.portable import twelve_digits
from hexgen2.region import Region
from hexgen2.search.planning.layers import balance_many
from hexgen2.search.planning.limits import MixedSteps, least_period_s, least_step_s, mean_period_s
from hexgen2.search.planning.pipeline_rows import Forms, PipelineRows, Steps, StepTimes
from hexgen2.search.planning.pipelines import Pipelines
from hexgen2.search.planning.stage_kinds import StageKind
from hexgen2.search.planning.timing import Timings
from hexgen2.search.problem import Problem

FOUND = 1 - 1e-3
"""Of the requests/s of divisions that the planner tries, this share: ties may be decided otherwise there."""
LIKELY = 2
"""Pipelines of a group of which the one that is sure to be good is sought: those with the highest limits."""
HALVINGS = 5
"""How often the range is halved in which the most requests lie that keep a target per output token."""


class Limits(NamedTuple):
    """Limits on the requests/s of n pipelines.

    batch : [n, c] no division of the layers holds more requests within the targets, for each size of chunk if
        it is to be chosen
    of_chunks : [n, c] requests/s that no division exceeds
    least : [n] that the planner finds; 0 where that is not known
    """

    batch: np.ndarray
    of_chunks: np.ndarray
    least: np.ndarray


class Contenders(NamedTuple):
    """The pipelines that may be the best of their groups.

    batch, of_chunks : [n, c] limits on the requests that they hold, and on their requests/s (see Limits)
    least : [n] requests/s that the planner finds for their groups; 0 where that is not known
    """

    rows: PipelineRows
    batch: np.ndarray
    of_chunks: np.ndarray
    least: np.ndarray

    @property
    def most(self) -> np.ndarray:
        """[n] requests/s that no plan of a pipeline exceeds."""
        return np.asarray(self.of_chunks.max(axis=1))


@dataclass(frozen=True)
class PlanLimit:
    """What no plan of a group exceeds: in requests/s, and, where a colocated group may work for others, in
    work of both phases (None otherwise)."""

    req_s: float
    region: Region | None


class ContenderSearch:
    """Finds the contenders under one goal. Without targets, replicas are planned for full load, of which more
    is known beforehand."""

    def __init__(self, pipelines: Pipelines, problem: Problem) -> None:
        self.problem, self._pipelines = problem, pipelines

    def rows(self, groups: Sequence[Forms]) -> PipelineRows:
        """The pipelines that these groups can form, whether or not the model fits."""
        rows = PipelineRows.of(self._pipelines.stage_kinds, groups)
        return rows.only(rows.stages <= self.problem.model.layers)

    def of(self, role: str, rows: PipelineRows) -> Contenders:
        """Those of the groups that can form these pipelines."""
        rows, batch = self._fitting(role, rows)
        if not len(rows):
            return Contenders(rows, np.zeros((0, 1)), np.zeros((0, 1)), np.zeros(0))
        limits = self._limits(role, rows, batch)
        first = np.unique(rows.group, return_index=True)[1]
        counts = np.diff(first, append=len(rows))
        least = np.repeat(np.maximum.reduceat(limits.least, first), counts)
        most = limits.of_chunks.max(axis=1)
        may = (most >= least) & (most > 0)
        return Contenders(rows.only(may), limits.batch[may], limits.of_chunks[may], least[may])

    def full_load_rates(self, rows: PipelineRows) -> tuple[np.ndarray, np.ndarray]:
        """The groups [n] of those of the pipelines in which the model fits, and requests/s [n, c] that they
        are sure to serve as colocated replicas without targets, for each size of chunk."""
        rows, batch = self._fitting("colocated", rows)
        if not len(rows):
            return rows.group, np.zeros((0, len(self._pipelines.chunks)))
        held = np.tile(batch, len(self._pipelines.chunks))
        steps = self._mixed_steps(rows, StepTimes(self.problem.costs, rows), np.maximum(held, 1))
        return rows.group, self._evenly_divided_req_s(rows, batch, *steps)

    def _evenly_divided_req_s(
        self,
        rows: PipelineRows,
        batch: np.ndarray,
        decodes: np.ndarray,
        mixed: Timings,
        rest: Timings,
        chains: MixedSteps,
    ) -> np.ndarray:
        """[n, c] requests/s of colocated replicas with these steps whose mean is divided evenly."""
        layers, osl = self.problem.model.layers, self.problem.costs.osl
        chunks = len(self._pipelines.chunks)
        room = np.tile(rows.max_layers("decode", batch), (chunks, 1))
        split = balance_many(layers, rest.mean(mixed, chains.share), room)
        found = decodes / (osl * mean_period_s(mixed, rest, split, chains))
        return np.asarray(found.reshape(chunks, len(rows)).T)

    def _fitting(self, role: str, rows: PipelineRows) -> tuple[PipelineRows, np.ndarray]:
        """The pipelines in which the model fits, and their largest batches [n]."""
        costs, layers = self.problem.costs, self.problem.model.layers
        if role != "prefill":
            batch = rows.largest_batch("decode", costs.batch_cap, layers)
        else:
            batch = np.zeros(len(rows))
            for each in reversed(self._pipelines.prefill_batches):
                batch[rows.fit("prefill", self._prompts_held(rows, each), layers)] = each
        return rows.only(batch > 0), batch[batch > 0]

    def _limits(self, role: str, rows: PipelineRows, batch: np.ndarray) -> Limits:
        """Limits on the requests/s of these pipelines."""
        if role == "colocated" and self._pipelines.chunks:
            return self._mixed_limits(rows, batch)
        pipelined, targets = self.problem.pipeline == "pipelined", self.problem.targets
        if role == "decode" and pipelined and targets.given:
            return self._decode_limits(rows, batch)
        full = role == "prefill" and pipelined and not targets.given
        most = self._prefill_req_s(rows, batch) if full else self._most_req_s(role, rows, batch)
        return Limits(batch[:, None], most[:, None], np.zeros(len(rows)))

    def _prompts_held(self, rows: PipelineRows, batch: np.ndarray | float) -> np.ndarray:
        """[n] prompts whose KV caches prefill replicas hold, whose steps have so many prompts each."""
        batches = prefill_batches_held(self.problem.pipeline, rows.stages)  # type: ignore[arg-type]
        return np.full(len(rows), np.maximum(prompts_held(0.0, 1), batch) * batches)

    def _prefill_req_s(self, rows: PipelineRows, batch: np.ndarray) -> np.ndarray:
        """[n] for prefill replicas that always fill their steps: those of layers divided for that, if enough
        steps are in flight."""
        most = rows.max_layers("prefill", self._prompts_held(rows, batch))
        times = StepTimes(self.problem.costs, rows).of(Steps.of(batch, np.zeros_like(batch)))
        stage_s = times.stage_s(balance_many(self.problem.model.layers, times, most))
        return np.asarray(batch / np.maximum(stage_s.max(axis=1), times.hop_s.max(axis=1)))

    def _most_req_s(self, role: str, rows: PipelineRows, batch: np.ndarray) -> np.ndarray:
        """[n] for replicas whose steps are not mixed: every request passes all L layers, so L times the
        requests/s is at most the layers/s of all stages."""
        costs, running, outputs = self.problem.costs, batch.astype(float), 1.0
        if role != "prefill":
            outputs = costs.osl
            running = micro_batch(self.problem.pipeline, running, rows.stages)  # type: ignore
        rates = np.zeros(rows.kind.shape)
        for number, row, column in rows.places():
            kind = rows.kinds.every[number]
            if role == "colocated":
                pairs = zip(running[row].tolist(), batch[row].tolist(), strict=True)
                rates[row, column] = [self._turns_req_s(kind, *pair) for pair in pairs]
            else:
                most, which = np.unique(running[row], return_inverse=True)
                phase: Phase = "prefill" if role == "prefill" else "decode"
                rates[row, column] = costs.most_requests_s(phase, kind.group, most)[which]
        return np.cumsum(rates, axis=1)[:, -1] / (self.problem.model.layers * outputs)

    def _turns_req_s(self, kind: StageKind, running: float, batch: float) -> float:
        """The most layers/s, times requests, of a stage of a colocated replica that holds `batch` requests,
        whose steps have up to `running` of them, beside the prefills between two decode steps; remembered."""
        key = running, batch
        if key not in kind.turns_req_s:
            costs = self.problem.costs
            best = costs.fastest_batch("decode", kind.group, running)
            prompts = costs.fastest_batch("prefill", kind.group, self._pipelines.prompts(batch))
            turn_s = best / (costs.osl * prompts) * costs.layer_s("prefill", kind.group, prompts)
            kind.turns_req_s[key] = best / (costs.layer_s("decode", kind.group, best) + turn_s)
        return kind.turns_req_s[key]

    def _decode_limits(self, rows: PipelineRows, batch: np.ndarray) -> Limits:
        """Those of decode replicas under targets."""
        layers, times = self.problem.model.layers, StepTimes(self.problem.costs, rows)

        def token_s(held: np.ndarray) -> np.ndarray:
            decodes = held / rows.stages
            steps = Steps.of(np.zeros_like(decodes), decodes)
            return np.asarray(rows.stages * least_step_s(times.of(steps), layers))

        held = self._within(batch, token_s)
        most = np.minimum(
            self._most_req_s("decode", rows, np.maximum(held, 1)), self._in_time_req_s(held, token_s)
        )
        return Limits(held[:, None], most[:, None], np.zeros(len(rows)))

    def _mixed_limits(self, rows: PipelineRows, batch: np.ndarray) -> Limits:
        """Those of colocated replicas whose steps have chunks of so many prompts."""
        count, chunks = len(rows), self._pipelines.chunks
        layers, osl, times = (
            self.problem.model.layers,
            self.problem.costs.osl,
            StepTimes(self.problem.costs, rows),
        )
        stages = np.tile(rows.stages, len(chunks))

        def token_s(held: np.ndarray) -> np.ndarray:
            _, mixed, rest, chains = self._mixed_steps(rows, times, held)
            return np.asarray(stages * least_period_s(mixed, rest, layers, chains))

        held = np.tile(batch, len(chunks))
        if self.problem.targets.given:
            held = self._within(held, token_s)
        decodes, mixed, rest, chains = self._mixed_steps(rows, times, np.maximum(held, 1))
        most = decodes / (osl * least_period_s(mixed, rest, layers, chains))
        least = np.zeros(count)
        if self.problem.targets.given:
            most = np.minimum(most, self._in_time_req_s(held, token_s))
        else:
            first = _first_of_groups(rows.group, most.reshape(len(chunks), count).max(axis=0))
            turns = (np.arange(len(chunks))[:, None] * count + first).ravel()
            steps = decodes[turns], mixed.only(turns), rest.only(turns), chains.only(turns)
            found = self._evenly_divided_req_s(rows.only(first), batch[first], *steps)
            least[first] = found.max(axis=1) * FOUND
        held, most = (each.reshape(len(chunks), count).T for each in (held, most))
        return Limits(held, most, least)

    def _mixed_steps(
        self, rows: PipelineRows, times: StepTimes, held: np.ndarray
    ) -> tuple[np.ndarray, Timings, Timings, MixedSteps]:
        """The steps of colocated replicas that hold [c n] requests, for each size of chunk: the decodes in a
        step, mean times of mixed ones and of those with decodes only, and which are mixed."""
        osl, chunks = self.problem.costs.osl, np.repeat(self._pipelines.chunks, len(rows))
        decodes = np.minimum(held / np.tile(rows.stages, len(self._pipelines.chunks)), osl * chunks)
        plain = Steps.of(chunks, decodes)
        pairs = zip(plain.prompts.tolist(), plain.decodes.tolist(), strict=True)
        steps = [mixed_steps(chunk, many, osl) for chunk, many in pairs]
        first = np.array([each[0] for each in steps]).T
        # Where all mixed steps are alike, the second kind of them has a share of 0.
        second = np.array([each[-1] if len(each) > 1 else (*each[0][:2], 0.0) for each in steps]).T
        mixed, prompts = times.of(plain._replace(prompts=first[0], decodes=first[1])), first[0]
        if second[2].any():
            others = times.of(plain._replace(prompts=second[0], decodes=second[1]))
            mixed = mixed.mean(others, second[2][plain.kind])
            prompts = (1 - second[2]) * prompts + second[2] * second[0]
        prompts = prompts[plain.kind]
        rest = times.of(plain._replace(prompts=np.zeros_like(plain.prompts)))
        return (
            decodes,
            mixed,
            rest,
            MixedSteps(np.minimum(1.0, decodes / (osl * prompts)), prompts, mixed.stages),
        )

    def _within(self, batch: np.ndarray, token_s: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """[m] no pipeline holds more requests than these, up to [m] `batch`, within the target per output
        token: 0 where not even one. An output token takes no less than token_s of the requests held, which
        grows with them."""
        target_s = self.problem.targets.tpot_s
        if target_s is None:
            return batch
        late = token_s(batch.astype(float)) > target_s
        if not late.any():
            return batch
        low, high = np.ones(len(batch)), batch.astype(float)
        never = late & (token_s(low) > target_s)
        for _ in range(HALVINGS):
            middle = np.where(late, (low + high) / 2, high)
            slow = token_s(middle) > target_s
            low, high = np.where(slow, low, middle), np.where(slow, middle, high)
        return np.where(never, 0, np.floor(high).astype(int))

    def _in_time_req_s(self, held: np.ndarray, token_s: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """[m] requests/s at which the share asked for, at most, finds one of so many places at once
        (cost_model/queueing.py, DecodeQueue)."""
        others = self._others[held]
        under_way = np.maximum(1.0, np.minimum(held, 1 + others))
        return np.where(held > 0, others / (self.problem.costs.osl * token_s(under_way)), 0.0)

    @cached_property
    def _others(self) -> np.ndarray:
        """The mean of requests under way at which the share asked for finds one of 0, 1, 2, ... places."""
        from scipy.special import gammainccinv  # Slow to import; a search without targets does without.

        places = np.arange(1, self.problem.costs.batch_cap + 1)
        found = gammainccinv(places, self.problem.targets.attainment).tolist()
        return np.array([0.0, *map(twelve_digits, found)])


def _first_of_groups(group: np.ndarray, most: np.ndarray) -> np.ndarray:
    """The numbers, rising, of the LIKELY pipelines of each group that have the highest limits."""
    order = np.lexsort((-most, group))
    place = np.arange(len(order)) - np.searchsorted(group, group[order])
    return np.asarray(np.sort(order[place < LIKELY]))
