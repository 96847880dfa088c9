"""A quantised matrix, or a worker's part of one, as it comes from a checkpoint: one byte for each weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from runtime.engine.torch.quantised.activations import Activations


class Kind(IntEnum):
    """What a code means; the kernels know these numbers."""

    INT4 = 0
    INT8 = 1
    FP8 = 2

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self == Kind.INT4 else 8

    @property
    def middle(self) -> int:
        """The code of zero where integers have no zeros of their own."""
        return {Kind.INT4: 8, Kind.INT8: 128, Kind.FP8: 0}[self]


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """weight[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g], where g = groups[i].

    Attributes
    ----------
    kind : INT4 has codes 0 to 15, INT8 0 to 255; of FP8 (E4M3) the codes are the bits, and there are no zeros
    codes : [out, in] uint8
    scales : [out, groups] float32, float16 or bfloat16
    zeros : [out, groups] uint8; None: the kind's middle
    groups : [in] int64, the group of each input
    activations : how inputs are rounded; None: not at all
    """

    kind: Kind
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor
    activations: Activations | None = None

    def value(self) -> torch.Tensor:
        """What it stands for, [out, in] float32."""
        if self.kind == Kind.FP8:
            steps = self.codes.view(torch.float8_e4m3fn).float()
        else:
            zeros = self.kind.middle if self.zeros is None else self.zeros[:, self.groups].float()
            steps = self.codes.float() - zeros
        return steps * self.scales.float()[:, self.groups]

    def padded(self, outputs: int) -> QuantisedWeight:
        """With further outputs, which are zero."""
        missing = outputs - len(self.codes)
        zeros = None if self.zeros is None else _padded(self.zeros, missing)
        return replace(
            self, codes=_padded(self.codes, missing), scales=_padded(self.scales, missing), zeros=zeros
        )

    def stacks_on(self, other: QuantisedWeight) -> bool:
        """Whether both can be one matrix, with the outputs of one below those of the other."""
        return (
            self.kind == other.kind
            and self.scales.dtype == other.scales.dtype
            and (self.zeros is None) == (other.zeros is None)
            and torch.equal(self.groups, other.groups)
            and self._rounds_like(other)
        )

    def _rounds_like(self, other: QuantisedWeight) -> bool:
        if self.activations is None:
            return other.activations is None
        return self.activations.is_like(other.activations)


def stacked(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """One matrix of parts that stack: outputs of the first, then of the second, and so on."""
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat((values, values.new_zeros(rows, *values.shape[1:])))
