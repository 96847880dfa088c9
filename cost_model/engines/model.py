"""Cost models of today's engines: a step is a sum of operators, and of what the engine adds.

    layer = products + prompts + decodes + experts + exchange + elementwise, each times the engine's factor,
            + layer_us, with experts mixture_us, with latent attention latent_us,
            with prompts prompt_layer_us; all times groups where attention is data-parallel
    stage = layers * layer + step_us, on the last stage + head + request_us * requests

Operators are fitted to measured kernels (cost_model/operators), the engine's numbers to runs of whole
servers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import ClassVar, Self

import numpy as np

from cost_model.architecture import ModelArchitecture
from cost_model.base import Origin, Phase, TensorGroup, Work
from cost_model.calibrated import FEW, Calibrated
from cost_model.coefficients import PRIORS, ZERO_FIT_ERROR
from cost_model.engines.layers import StepOperators
from cost_model.engines.numbers import EngineFits, FittedEngine, HostNumbers, shipped
from cost_model.hardware import CATALOGUE, NO_LINK, Accelerator
from cost_model.lengths import RequestLengths
from cost_model.operators import Operators
from cost_model.operators.arithmetic import Amount
from cost_model.operators.numbers import OperatorFits

_US = 1e-6
_KEPT = 1 << 16
_BELOW = 1 - 1e-12
"""Just below a size at which a tile more begins, whatever rounding makes of that size."""


class EngineSteps(Calibrated):
    """The steps of one engine. On CPUs, which no engine was measured on, it is the general roofline.

    Parameters
    ----------
    fitted : the engine's numbers; None: those that ship
    operators : the numbers of operators; None: those that ship
    """

    engine_name: ClassVar[str]
    times_expert_parallel = True
    tiled = True

    def __init__(
        self,
        model: ModelArchitecture,
        lengths: RequestLengths,
        batch_cap: int = 256,
        fitted: FittedEngine | None = None,
        operators: OperatorFits | None = None,
    ) -> None:
        super().__init__(model, lengths, batch_cap, PRIORS)
        self.fitted = shipped().engines[self.engine_name] if fitted is None else fitted
        self.calibration = f"{self.engine_name} {self.fitted.versions}".strip()
        numbers, latent = self.fitted.numbers, model.latent is not None
        self._prompts = numbers.latent_prompts if latent else numbers.prompts
        self._decodes = numbers.latent_decodes if latent else numbers.decodes
        self._source = shipped().source
        self._fits = shipped().all_operators if operators is None else operators
        self._hosts = dict(self.fitted.hosts)
        self._cards: dict[Accelerator, Operators] = {}
        self._layers: dict[TensorGroup, StepOperators] = {}
        self._by_tokens: dict[tuple[TensorGroup, float, float], float] = {}
        self._best: dict[tuple[Phase, TensorGroup], tuple[list[float], list[float], list[float]]] = {}

    @classmethod
    def of(cls, model: ModelArchitecture, lengths: RequestLengths, fits: EngineFits) -> Self:
        """With the numbers of a calibration (KeyError: it lacks the engine)."""
        made = cls(model, lengths, fitted=fits.engines[cls.engine_name], operators=fits.all_operators)
        made.calibration, made._source = f"{fits.name}: {made.calibration}", fits.source
        return made

    @property
    def origin(self) -> Origin:
        return Origin(self.calibration, self.engine_name, self._source)

    def first_token_s(self, accelerator: Accelerator) -> float:
        if accelerator.kind == "cpu":
            return 0.0
        numbers = self.fitted.numbers
        waits_us = numbers.first_token_us + numbers.first_layer_us * self.model.layers
        return waits_us * self.host(accelerator).first_token * _US

    def tokens_per_step(self, version: str) -> float:
        return self.fitted.speculative.get(version, {}).get(self.model.name, 1.0)

    def host(self, accelerator: Accelerator) -> HostNumbers:
        """How hosts of such GPUs differ; of those that were not measured, how those of a GPU of the same
        generation do."""
        known = self._hosts.get(accelerator.name)
        if known is None:
            relatives = [
                numbers
                for name, numbers in sorted(self.fitted.hosts.items())
                if name in CATALOGUE and CATALOGUE[name].generation == accelerator.generation
            ]
            known = self._hosts[accelerator.name] = relatives[0] if relatives else HostNumbers()
        return known

    def error(self, accelerator: Accelerator) -> float:
        if accelerator.kind == "cpu":
            return ZERO_FIT_ERROR
        held_out, here = self.fitted.held_out, self.fitted.hosts.get(accelerator.name)
        known = (
            [held_out.model, held_out.gpu] if here is None else [held_out.rows, here.error, held_out.model]
        )
        return max((error for error in known if error is not None), default=ZERO_FIT_ERROR)

    def measured(self, accelerator: Accelerator) -> bool:
        return accelerator.name in self.fitted.hosts

    def fitted_or_not(self, group: TensorGroup) -> list[str]:
        if group.accelerator.kind == "cpu":
            return []
        names: dict[str, list[str]] = {}
        for name, origin, error in self._operators(group).sources():
            names.setdefault(origin, []).append(f"{name} +- {error:.0%}")
        return [f"{origin}: {', '.join(operators)}" for origin, operators in names.items()]

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        if group.accelerator.kind == "cpu":
            return super().layer_work_s(group, work)
        layers, numbers, dp = self._operators(group), self.fitted.numbers, group.attention_dp
        prompts = max(1.0, work.sampled - work.decodes) if work.prompt_tokens else 0.0
        own = work.tokens / dp
        if dp > 1 and prompts:
            own = max(own, work.prompt_tokens / prompts)
        taken = self._of_tokens_s(group, layers, own, work.tokens)
        if prompts:
            share = 1.0 if dp == 1 else max(1 / dp, 1 / prompts)
            sizes = (max(1.0, prompts * share), work.prompt_tokens * share, work.prompt_attended * share)
            taken += self._prompts * layers.prompts_s(*sizes) + numbers.prompt_layer_us * _US
        if work.decodes:
            decodes = work.decodes if dp == 1 else max(1.0, work.decodes / dp)
            taken += self._decodes * layers.decodes_s(decodes, work.context / dp)
        return float(taken if dp == 1 else numbers.groups * taken)

    def layers_work_s(self, group: TensorGroup, work: Work) -> np.ndarray:
        if np.size(work.sampled) < FEW or group.accelerator.kind == "cpu":
            return super().layers_work_s(group, work)
        layers, numbers, dp = self._operators(group), self.fitted.numbers, group.attention_dp
        prompt_tokens, attended, decodes, context, sampled = map(np.asarray, work)
        tokens = prompt_tokens + decodes
        with_prompts, with_decodes = np.flatnonzero(prompt_tokens), np.flatnonzero(decodes)
        prompts = np.maximum(1.0, sampled - decodes)[with_prompts]
        if dp == 1:
            unlike, which = np.unique(tokens, return_inverse=True)
            taken = np.asarray(self._sum_of_tokens_s(group, layers, unlike, unlike))[which]
        else:
            own = tokens / dp
            own[with_prompts] = np.maximum(own[with_prompts], prompt_tokens[with_prompts] / prompts)
            taken = np.asarray(self._sum_of_tokens_s(group, layers, own, tokens))
        if len(with_prompts):
            share = 1.0 if dp == 1 else np.maximum(1 / dp, 1 / prompts)
            sizes = prompt_tokens[with_prompts] * share, attended[with_prompts] * share
            attention_s = layers.prompts_s(np.maximum(1.0, prompts * share), *sizes)
            taken[with_prompts] += self._prompts * attention_s + numbers.prompt_layer_us * _US
        if len(with_decodes):
            each = decodes[with_decodes] if dp == 1 else np.maximum(1.0, decodes[with_decodes] / dp)
            taken[with_decodes] += self._decodes * layers.decodes_s(each, context[with_decodes] / dp)
        return taken if dp == 1 else numbers.groups * taken

    def fastest_batch(self, phase: Phase, group: TensorGroup, most: float) -> float:
        """Steps take longer by whole tiles, so that full tiles may pass more requests/s than one request more
        does. Between two such sizes the requests/s of a layer rise."""
        if group.accelerator.kind == "cpu":
            return most
        sizes, fastest, _ = self._fastest_up_to(phase, group, most)
        known = bisect_right(sizes, most)
        candidates = (*fastest[known - 1 : known], most)
        return max(candidates, key=lambda batch: batch / self.layer_s(phase, group, batch))

    def most_requests_s(self, phase: Phase, group: TensorGroup, most: np.ndarray) -> np.ndarray:
        if group.accelerator.kind == "cpu":
            return super().most_requests_s(phase, group, most)
        sizes, _, rates = self._fastest_up_to(phase, group, float(most.max()))
        full = np.array([0.0, *rates])[np.searchsorted(sizes, most, "right")]
        return np.asarray(np.maximum(full, most / self._layers_s(phase, group, most)))

    def _fastest_up_to(
        self, phase: Phase, group: TensorGroup, most: float
    ) -> tuple[list[float], list[float], list[float]]:
        """The batches that fill their last tiles, rising, to `most` or beyond, the fastest up to each, and
        its requests/s; remembered. Prefills are of whole prompts, so theirs are simply all batches."""
        key = (phase, group)
        if key in self._best and self._best[key][0][-1] >= most:
            return self._best[key]
        if phase == "prefill":
            sizes = [float(batch) for batch in range(1, math.ceil(most) + 1)]
        else:
            highest = float(max(most, self.batch_cap))
            steps = self._operators(group).tile_batches
            count = {step: math.ceil(highest / step) for step in steps}
            full = {k * step * _BELOW for step in steps for k in range(1, count[step] + 1)}
            sizes = sorted({*full, highest})
        each = (np.array(sizes) / self._layers_s(phase, group, np.array(sizes))).tolist()
        best, rates = list[float](), list[float]()
        for size, rate in zip(sizes, each, strict=True):
            better = not rates or rate > rates[-1]
            best.append(size if better else best[-1])
            rates.append(rate if better else rates[-1])
        self._best[key] = sizes, best, rates
        return self._best[key]

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        if group.accelerator.kind == "cpu":
            return super().edge_work_s(group, sampled, last)
        numbers, host = self.fitted.numbers, self.host(group.accelerator)
        taken = numbers.step_us * host.steps * _US
        if last:
            head = self._operators(group).head_s(max(1.0, sampled / group.attention_dp))
            taken += numbers.products * head + numbers.request_us * host.steps * _US * sampled
        return float(taken)

    def edges_work_s(self, group: TensorGroup, sampled: np.ndarray, last: bool) -> np.ndarray:
        if len(sampled) < FEW or group.accelerator.kind == "cpu":
            return super().edges_work_s(group, sampled, last)
        numbers, host = self.fitted.numbers, self.host(group.accelerator)
        taken = np.full(len(sampled), numbers.step_us * host.steps * _US)
        if last:
            head = self._operators(group).head_s(np.maximum(1.0, sampled / group.attention_dp))
            taken += numbers.products * head + numbers.request_us * host.steps * _US * sampled
        return taken

    def _of_tokens_s(self, group: TensorGroup, layers: StepOperators, own: float, tokens: float) -> float:
        """What depends on the tokens of a step only, which many steps have in common."""
        key = (group, own, tokens)
        known = self._by_tokens.get(key)
        if known is not None:
            return known
        if len(self._by_tokens) >= _KEPT:
            self._by_tokens.clear()
        taken = self._by_tokens[key] = self._sum_of_tokens_s(group, layers, own, tokens)
        return taken

    def _sum_of_tokens_s(
        self, group: TensorGroup, layers: StepOperators, own: Amount, tokens: Amount
    ) -> Amount:
        numbers, model = self.fitted.numbers, self.model
        over_nvlink = group.link.fabric == "nvlink"
        taken = (
            numbers.products * layers.products_s(own)
            + numbers.elementwise * layers.elementwise_s(own)
            + numbers.layer_us * _US
        )
        if model.latent is not None:
            taken += numbers.latent_us * _US
        if model.experts > 1:
            factor = numbers.experts * self.fitted.experts.get(model.weight_type, 1.0)
            taken += (
                factor * layers.experts_s(tokens, numbers.skew)
                + model.mixture_share * numbers.mixture_us * _US
            )
        if group.degree > 1 and group.link != NO_LINK:
            factor = numbers.exchange if over_nvlink else 1.0
            taken += factor * layers.exchange_s(own, tokens)
        return taken

    def _operators(self, group: TensorGroup) -> StepOperators:
        known = self._layers.get(group)
        if known is None:
            card = group.accelerator
            if card not in self._cards:
                self._cards[card] = Operators(card, self._fits)
            known = self._layers[group] = StepOperators(self.model, group, self._cards[card])
        return known


class VllmSteps(EngineSteps):
    """vLLM."""

    name = engine_name = "vllm"


class SglangSteps(EngineSteps):
    """SGLang."""

    name = engine_name = "sglang"


class TrtllmSteps(EngineSteps):
    """TensorRT-LLM."""

    name = engine_name = "trtllm"


ENGINES: dict[str, type[EngineSteps]] = {
    engine.engine_name: engine for engine in (VllmSteps, SglangSteps, TrtllmSteps)
}
"""The cost models of engines by name."""
