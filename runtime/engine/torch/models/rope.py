"""Rotary position embedding: pairs of values in query and key are rotated in proportion to the position."""

from __future__ import annotations

import math
from typing import Any

import torch

from runtime.engine.torch.loader import CheckpointConfig

KEPT_ROWS = 64
"""Tokens of a step whose angles are always in the same memory; see `recorded.py`."""
_KINDS = ("default", "linear", "llama3", "longrope", "yarn")


class Rotary:
    """Rotates heads by their tokens' positions; `begin` prepares the angles that all layers of a step share.

    Attributes
    ----------
    cosines, sines : of these angles, [tokens, rotated / 2]; of few tokens, always in the same memory
    position_limit : the longest sequence in tokens; None: no limit

    Parameters
    ----------
    theta : base of the frequencies if config.json has none
    scaling : the parameters; None: those of config.json
    partial : the share of a head that is rotated, from its first value on; None: config.json must name none
    """

    def __init__(
        self,
        config: CheckpointConfig,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        theta: float = 10000.0,
        scaling: dict[str, Any] | None = None,
        partial: float | None = None,
    ) -> None:
        scaling = rope_parameters(config) if scaling is None else scaling
        if partial is None:
            _require_whole_heads(config, scaling)
        elif not isinstance(partial, int | float) or not 0 < partial <= 1 or int(head_dim * partial) % 2:
            problem = f"is {partial!r}, which rotates no even number of a head's {head_dim} values"
            raise config.error("partial_rotary_factor", problem, "download the checkpoint again")
        width = int(head_dim * (partial or 1))
        if width % 2:
            raise config.error("head_dim", f"{head_dim} is odd", "choose another checkpoint")
        frequencies, self._scale = rope_frequencies(config, width, theta, scaling)
        self.position_limit = _trained(config, scaling) if _kind(scaling) == "longrope" else None
        self._frequencies = frequencies.to(device)
        self._dtype = dtype
        self._kept = torch.empty((2, KEPT_ROWS, len(frequencies)), dtype=dtype, device=device)

    def begin(self, positions: torch.Tensor) -> None:
        """Compute the angles for a step's positions, [tokens]."""
        angles = positions.float()[:, None] * self._frequencies
        self.cosines = self._in_place(0, angles.cos())
        self.sines = self._in_place(1, angles.sin_())

    def _in_place(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """Scaled, in the engine's type, and of few tokens in the memory that recorded steps read."""
        if self._scale != 1:
            values.mul_(self._scale)
        if len(values) > KEPT_ROWS:
            return values.to(self._dtype)
        return self._kept[number, : len(values)].copy_(values)

    def rotate(self, x: torch.Tensor) -> None:
        """Rotate heads, [tokens, heads, head_dim], in place: the first half of what is rotated with the
        second."""
        low, high = x[..., : 2 * self.cosines.shape[1]].chunk(2, dim=-1)
        cosines, sines = self.cosines.unsqueeze(1), self.sines.unsqueeze(1)
        turned = torch.addcmul(high * cosines, low, sines)
        low.mul_(cosines).addcmul_(high, sines, value=-1)
        high.copy_(turned)


def rope_parameters(config: CheckpointConfig, kind: str = "") -> dict[str, Any]:
    """The parameters that config.json has for layers of a kind, by new or old keys; "": for all layers.

    Raises
    ------
    InputError : they differ by kind, and none is given
    """
    found = config.get("rope_parameters", config.get("rope_scaling", {}))
    if kind and isinstance(found, dict) and isinstance(found.get(kind), dict):
        found = found[kind]
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise config.error(
            "rope_parameters", "has no single set of values for all layers", "choose another checkpoint"
        )
    return found


def rope_frequencies(
    config: CheckpointConfig, head_dim: int, theta: float, scaling: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """The angle per position [head_dim / 2] and the factor of sines and cosines, with scaling applied.

    Raises
    ------
    InputError : the scaling is not supported or lacks a number
    """
    kind = _kind(scaling)
    if kind not in _KINDS:
        raise config.error("rope_scaling", f"{kind!r} is not supported", f"choose one of {', '.join(_KINDS)}")
    scaling = {**scaling, "original_max_position_embeddings": _trained(config, scaling)}
    try:
        base = float(scaling.get("rope_theta", config.get("rope_theta", theta)))
        frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if kind == "default":
            return frequencies, 1.0
        if kind == "linear":
            return frequencies / float(scaling["factor"]), 1.0
        if kind == "llama3":
            return _llama3(frequencies, scaling), 1.0
        if kind == "longrope":
            return _longrope(frequencies, config, scaling)
        return _yarn(frequencies, base, scaling)
    except KeyError as error:
        raise config.error("rope_scaling", f"lacks {error}", "download the checkpoint again") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        problem = f"has a value that is not a number ({error})"
        raise config.error("rope_scaling", problem, "download the checkpoint again") from error


def _kind(scaling: dict[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _trained(config: CheckpointConfig, scaling: dict[str, Any]) -> Any:
    """The longest sequence in training, before any scaling."""
    key, longest = "original_max_position_embeddings", config.get("max_position_embeddings")
    return scaling.get(key) or config.get(key, longest)


def _require_whole_heads(config: CheckpointConfig, scaling: dict[str, Any]) -> None:
    for values in (scaling, config.values):
        if values.get("partial_rotary_factor") not in (None, 1.0):
            raise config.error(
                "partial_rotary_factor", "only whole heads are rotated", "choose another checkpoint"
            )


def _llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, those between
    blended."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(scaling["original_max_position_embeddings"])
    turns = trained * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _longrope(
    frequencies: torch.Tensor, config: CheckpointConfig, scaling: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding and others, 2024, arXiv:2402.13753) within the trained length: each pair is stretched by
    a factor of its own, and attention gets sharper the longer sequences may become."""
    short = torch.tensor([float(factor) for factor in scaling["short_factor"]])
    if len(short) != len(frequencies):
        raise ValueError(f"{len(short)} factors for {len(frequencies)} pairs")
    trained = float(scaling["original_max_position_embeddings"])
    factor = float(scaling.get("factor") or config.get("max_position_embeddings", trained) / trained)
    sharper = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    given = scaling.get("attention_factor")
    return frequencies / short, sharper if given is None else float(given)


def _yarn(frequencies: torch.Tensor, base: float, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (Peng and others, 2023, arXiv:2309.00071, sections 3.2 and 3.4): pairs that turn less than
    `beta_slow` times in the trained context are stretched by `factor`, those of more than `beta_fast`
    kept, a blend by index between; attention gets sharper by a power of the factor's logarithm."""
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    pairs = len(frequencies)

    def pair_of(turns: float) -> float:
        return pairs * math.log(trained / (turns * 2 * math.pi)) / math.log(base)

    first = pair_of(float(scaling.get("beta_fast") or 32))
    last = pair_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    stretched = ((torch.arange(pairs) - first) / max(last - first, 1e-3)).clamp(0, 1)
    blended = frequencies * (1 - stretched) + frequencies / factor * stretched
    return blended, _yarn_attention(factor, scaling)


def _yarn_attention(factor: float, scaling: dict[str, Any]) -> float:
    """What YaRN multiplies sines and cosines by: DeepSeek's two weights, or the paper's one."""
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def sharper(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return sharper(float(above)) / sharper(float(below)) if above and below else sharper(1.0)
