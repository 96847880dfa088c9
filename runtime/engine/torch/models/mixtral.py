"""The Mixtral family: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from runtime.engine.torch.experts import Mixture
from runtime.engine.torch.loader import CheckpointConfig
from runtime.engine.torch.models.mistral import MistralStage
from runtime.engine.torch.models.mixture import MixtureStage


class MixtralStage(MixtureStage, MistralStage):
    """One worker's part of a Mixtral model."""

    default_theta = 1000000.0
    default_eps = 1e-5
    default_window = None
    expert_names = ("w1", "w3", "w2")

    def _parse_mixture(self, config: CheckpointConfig) -> Mixture:
        experts, chosen = config.count("num_local_experts"), config.count("num_experts_per_tok")
        return Mixture(experts, chosen, config.count("intermediate_size"))

    def _mixture_name(self, name: str) -> str:
        return f"{name}.block_sparse_moe"
