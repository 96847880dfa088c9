"""Mixtures of experts: feed-forwards of which each token uses a few, chosen by a router."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from runtime import native
from runtime.engine.torch.experts import Experts, Mixture, Routing
from runtime.engine.torch.linear import Linear, Product
from runtime.engine.torch.loader import CheckpointConfig, Cut
from runtime.engine.torch.models.base import ModelSpec
from runtime.engine.torch.models.llama import FeedForward, LlamaStage

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From [tokens, hidden] to the weights of each token's experts, and their numbers, both [tokens, chosen]."""


class MixtureStage(LlamaStage):
    """One worker's part of a mixture of experts.

    The ranks of a tensor-parallel group hold whole experts if their number divides evenly, otherwise the same
    columns of every expert; either way their outputs are summed as for any feed-forward. All ranks route
    tokens alike, because they see the same activations.
    """

    expert_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    replays = False  # Which experts have rows, and how many, is known on the host.
    _renormalises = True

    def _parse(self) -> ModelSpec:
        spec, config = super()._parse(), self.checkpoint.config
        self._mixture = self._parse_mixture(config)
        if self._mixture.chosen > self._mixture.experts:
            problem = f"{self._mixture.chosen} of {self._mixture.experts} experts cannot be chosen"
            raise config.error("num_experts_per_tok", problem, "download the checkpoint again")
        return spec

    @abstractmethod
    def _parse_mixture(self, config: CheckpointConfig) -> Mixture:
        """Read the sizes of experts from config.json."""

    def _has_experts(self, layer: int) -> bool:
        """Whether this layer has experts, or a single feed-forward."""
        return True

    def _mixture_name(self, name: str) -> str:
        """What the names of a layer's router and experts begin with."""
        return f"{name}.mlp"

    def _split_widths(self) -> dict[str, int]:
        experts = {"moe_intermediate_size": self._mixture.width}
        widths = {} if self._mixture.experts % self.rank.tp == 0 else experts
        if all(self._has_experts(layer) for layer in range(self.spec.layers)):
            return widths
        return widths | super()._split_widths()

    def _load_feed_forward(self, name: str, layer: int) -> FeedForward:
        if not self._has_experts(layer):
            return super()._load_feed_forward(name, layer)
        route, experts = self._load_router(self._mixture_name(name)), self._load_experts(name)

        def routed(x: torch.Tensor) -> torch.Tensor:
            return experts(x, *route(x))

        return routed if experts.repeatable else lambda x: native.apart(routed, x)

    def _load_router(self, name: str) -> Router:
        experts = self._mixture.experts
        router = self.fused_columns((f"{name}.gate",), ((experts, 0, experts),), bias=False)
        routing = Routing(self._mixture.chosen, self._renormalises)
        return lambda x: routing(router(x))

    def _load_experts(self, name: str) -> Experts:
        held, cut = self._share_of_experts()
        gate_up, down = list[Linear](), list[Linear]()
        for expert in held:
            own = f"{self._mixture_name(name)}.experts.{expert}"
            gate, up, out = (f"{own}.{part}" for part in self.expert_names)
            gate_up.append(self.fused_columns((gate, up), (cut, cut), bias=False))
            down.append(self.row_parallel(out, cut, bias=False))
        return self._experts(held.start, gate_up, down)

    def _experts(self, first: int, gate_up: Sequence[Product], down: Sequence[Product]) -> Experts:
        """Experts from `first` on."""
        by_kernels = self._kernels is not None and native.serves(self.dtype, self.device)
        return Experts(first, gate_up, down, self._activate, by_kernels and self._mixture.width % 2 == 0)

    def _share_of_experts(self) -> tuple[range, Cut]:
        """The experts that this rank holds, and the part of each one's width."""
        experts, first, end = self.cut(self._mixture.experts)
        width = self._mixture.width
        if experts % self.rank.tp:
            return range(experts), self.cut(width)
        return range(first, end), (width, 0, width)
