"""The Mixtral family: Mistral whose feed-forward is the best few of several experts, token by token."""

from __future__ import annotations

import torch

from runtime.engine.torch.loader import CheckpointConfig, Cut
from runtime.engine.torch.models.llama import FeedForward
from runtime.engine.torch.models.mistral import MistralStage


class MixtralStage(MistralStage):
    """One worker's part of a Mixtral model.

    The ranks of a tensor-parallel group hold whole experts if their number divides evenly, otherwise the same
    columns of every expert; either way their outputs are summed as for any feed-forward. All ranks route
    tokens alike, because they see the same activations.
    """

    default_theta = 1000000.0
    default_eps = 1e-5
    default_window = None

    def _experts(self, config: CheckpointConfig) -> int:
        experts, self._chosen = config.count("num_local_experts"), config.count("num_experts_per_tok")
        if self._chosen > experts:
            problem = f"{self._chosen} of {experts} experts cannot be chosen"
            raise config.error("num_experts_per_tok", problem, "download the checkpoint again")
        return experts

    def _load_feed_forward(self, name: str) -> FeedForward:
        name, experts = f"{name}.block_sparse_moe", self.spec.experts
        router = self.fused_columns((f"{name}.gate",), ((experts, 0, experts),), bias=False)
        held, cut = self._share_of_experts()
        parts = {expert: self._load_expert(f"{name}.experts.{expert}", cut) for expert in held}

        def run(x: torch.Tensor) -> torch.Tensor:
            weights, chosen = router(x).float().softmax(-1).topk(self._chosen, dim=-1)
            weights = (weights / weights.sum(-1, keepdim=True)).flatten()
            order = chosen.flatten().argsort(stable=True)
            counts = chosen.flatten().bincount(minlength=experts).tolist()
            output, start = torch.zeros_like(x), 0
            for expert, count in enumerate(counts):
                if count and expert in parts:
                    pairs = order[start : start + count]
                    tokens = pairs // self._chosen
                    share = parts[expert](x[tokens]) * weights[pairs].unsqueeze(1)
                    output.index_add_(0, tokens, share.to(x.dtype))
                start += count
            return output

        return run

    def _load_expert(self, name: str, cut: Cut) -> FeedForward:
        return self.gated((f"{name}.w1", f"{name}.w3", f"{name}.w2"), cut, bias=False)

    def _share_of_experts(self) -> tuple[range, Cut]:
        """The experts that this rank holds, and the part of each one's width."""
        experts, first, end = self.cut(self.spec.experts)
        if experts % self.rank.tp:
            return range(experts), self.cut(self.spec.ffn)
        return range(first, end), (self.spec.ffn, 0, self.spec.ffn)
