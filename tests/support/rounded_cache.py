"""The KV cache of transformers with keys and values rounded as formats of KV caches round them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

Rounding = Callable[[torch.Tensor], torch.Tensor]


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """E4M3 without scales."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def to_int8(values: torch.Tensor) -> torch.Tensor:
    """Integers of 8 bits, with a scale for each vector."""
    scale = values.abs().amax(-1, keepdim=True) / 127
    return (values / scale).round() * scale


ROUNDINGS: dict[str, Rounding] = {"fp8": to_fp8, "int8": to_int8}


class RoundedCache(DynamicCache):
    """The cache of transformers, in which keys and values are rounded. Latents of DeepSeek, which it holds in
    two parts, are rounded as one vector.

    Parameters
    ----------
    config : of the model
    rounding : what is done to keys and values; None: nothing
    jitter : relative standard deviation of noise that is added before they are rounded
    """

    def __init__(self, config: Any, rounding: Rounding | None, jitter: float = 0.0) -> None:
        super().__init__(config=config)
        self._rounding, self._jitter = rounding, jitter
        self._latent = hasattr(config, "kv_lora_rank")

    def update(self, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if self._latent:
            sizes = key.shape[-1], value.shape[-1]
            key, value = self._stored(torch.cat([key, value], dim=-1)).split(sizes, dim=-1)
        else:
            key, value = self._stored(key), self._stored(value)
        return super().update(key, value, *rest, **named)

    def _stored(self, values: torch.Tensor) -> torch.Tensor:
        if self._jitter:
            values = values * (1 + self._jitter * torch.randn_like(values))
        return self._rounding(values) if self._rounding else values
