"""How checkpoints with integers of 8 bits for activations, too (W8A8), round what is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime import native

Agree = Callable[[torch.Tensor], torch.Tensor]
"""From the ranges of a rank's part of each row to those of whole rows, [n, 2]; see `ranges_of`."""

_LOWEST, _HIGHEST = -128, 127
_SPAN = _HIGHEST - _LOWEST
_SMALLEST = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Activations:
    """x becomes (code - zero) * scale, with the nearest code from -128 to 127, as in compressed-tensors.

    Except that codes begin at -127 where rows have scales of their own and no zeros: the largest magnitude is
    127.5 scales, so that its code would depend on its last digit, and with it on how the model is divided.

    Attributes
    ----------
    symmetric : zeros are 0
    steps : [2] float32 on the CPU, scale and zero of all rows; None: each row has its own, by its range
    """

    symmetric: bool
    steps: torch.Tensor | None = None

    def is_like(self, other: Activations | None) -> bool:
        """Whether both round alike."""
        if other is None or self.symmetric != other.symmetric:
            return False
        if self.steps is None or other.steps is None:
            return self.steps is other.steps
        return torch.equal(self.steps, other.steps)

    def rounded(self, x: torch.Tensor, agree: Agree | None) -> torch.Tensor:
        """What the codes of x [n, in] float32 stand for."""
        scales, zeros = self._steps_of(x, agree)
        lowest = -_HIGHEST if self.symmetric and self.steps is None else _LOWEST
        codes = (x / scales + zeros).clamp_(lowest, _HIGHEST).round_()
        return codes.sub_(zeros).mul_(scales)

    def _steps_of(self, x: torch.Tensor, agree: Agree | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and zeros of rows, [n or 1, 1]."""
        if self.steps is not None:
            scale, zero = self.steps.to(x.device).view(2, 1, 1)
            return scale, zero
        ranges = ranges_of(x) if agree is None else agree(ranges_of(x))
        span = ranges.amax(1) / (_SPAN / 2) if self.symmetric else ranges.sum(1) / _SPAN
        scales = torch.where(span == 0, _SMALLEST, span).unsqueeze(1)
        if self.symmetric:
            return scales, torch.zeros_like(scales)
        return scales, (_LOWEST + ranges[:, :1] / scales).clamp_(_LOWEST, _HIGHEST).round_()


def ranges_of(x: torch.Tensor) -> torch.Tensor:
    """How far each row of x [n, in] float32 goes below and above zero -> [n, 2]."""
    if native.serves(x.dtype, x.device):
        return native.find_ranges(x.contiguous())
    return torch.stack((-x.amin(1), x.amax(1)), dim=1).clamp_(min=0)
