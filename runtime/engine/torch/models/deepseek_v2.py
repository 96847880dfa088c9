"""The DeepSeek-V2 family: DeepSeek-V3 with experts chosen by their share of a softmax."""

from __future__ import annotations

from runtime.engine.torch.experts import Mixture, Routing
from runtime.engine.torch.linear import Linear
from runtime.engine.torch.loader import CheckpointConfig
from runtime.engine.torch.models.deepseek import DeepseekV3Stage
from runtime.engine.torch.models.mixture import Router

_GREEDY, _GROUPED = "greedy", "group_limited_greedy"


class DeepseekV2Stage(DeepseekV3Stage):
    """One worker's part of a DeepSeek-V2 model."""

    default_dense, default_shared, default_factor = 0, 2, 1.0

    def _parse_mixture(self, config: CheckpointConfig) -> Mixture:
        config.require("norm_topk_prob", False, False)
        method = config.get("topk_method", _GREEDY)
        if method not in (_GREEDY, _GROUPED):
            known = f"choose one of {_GREEDY}, {_GROUPED}"
            raise config.error("topk_method", f"{method!r} is not supported", known)
        return super()._parse_mixture(config)

    def _parse_groups(self, config: CheckpointConfig) -> tuple[int, int]:
        if config.get("topk_method", _GREEDY) == _GREEDY:
            return 1, 1
        return config.count("n_group"), config.count("topk_group")

    def _load_router(self, name: str) -> Router:
        size = (self._mixture.experts, self.spec.hidden)
        router = Linear(self.checkpoint.read(f"{name}.gate.weight", size).float())
        return self._routed(router, Routing(**self._limits() | {"renormalises": False}))
