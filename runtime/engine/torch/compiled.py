"""Which kernels of our own compute what surrounds the products of a layer: compiled for CPUs, or for GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec

import torch

from runtime import native

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Steps of a layer in one call each.

    Attributes
    ----------
    rms_norm : of x [..., width], a weight and an epsilon: scaled to a root mean square of one, rounded, then
        multiplied by the weight
    norm_dims : most dimensions of that weight
    gate, gelu_gate : SiLU or GELU of the first half of each row [n, 2 x width], times the second half
    add : to the first, in place, the second, which has its size
    clamped_gate : of the same, a sharpness and a limit, as in gpt-oss
    layer_norm : of x [..., width], a weight, a bias and an epsilon
    relu : in place
    norm_heads : the norm of the first heads of [tokens, heads, head_dim], in place, each with its row of a
        weight [normed heads, head_dim]

    None: there is no such kernel.
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    norm_dims: int
    gate: Callable[[torch.Tensor], torch.Tensor]
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.Tensor.add_
    norm_heads: Callable[[torch.Tensor, torch.Tensor, float], None] | None = None
    gelu_gate: Callable[[torch.Tensor], torch.Tensor] | None = None
    clamped_gate: Callable[[torch.Tensor, float, float], torch.Tensor] | None = None
    layer_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor] | None = None
    relu: Callable[[torch.Tensor], torch.Tensor] = torch.relu_


def compiled_kernels(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels for a type on a device; None: torch's operators compute."""
    if native.serves(dtype, device):
        gelu_gate = partial(native.gate, is_gelu=True)
        return Kernels(
            rms_norm=native.rms_norm,
            norm_dims=1,
            gate=native.gate,
            add=native.add,
            norm_heads=native.norm_heads,
            gelu_gate=gelu_gate,
            clamped_gate=native.clamped_gate,
            layer_norm=native.layer_norm,
            relu=native.relu,
        )
    if triton_runs(dtype, device):
        from runtime.engine.torch.gpu import kernels

        return Kernels(kernels.rms_norm, 2, kernels.gate)
    return None


@cache
def triton_runs(dtype: torch.dtype, device: torch.device, head_dim: int = 64) -> bool:
    """Whether our kernels in Triton run on a GPU, for this size of heads: it may be missing, or its compiler,
    or the card may be too old or too small."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    from runtime.engine.torch.gpu import kernels

    try:
        kernels.try_out(dtype, device, head_dim)
    except Exception as error:  # of Triton, of compilers, of the driver
        log.warning("torch's operators compute on %s: kernels in Triton do not run (%s)", device, error)
        return False
    return True
