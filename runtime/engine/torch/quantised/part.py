"""A worker's part of a quantised matrix in a checkpoint, and what all formats share in reading it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cost_model.errors import InputError
from cost_model.quantization import WeightScheme
from runtime.engine.torch.loader import Checkpoint, Cut
from runtime.engine.torch.quantised.weight import Kind, QuantisedWeight

SCALES = ("F16", "BF16", "F32")
NUMBERS = ("I32", "I64")
_WORD_BITS = 32
_PACKED = ("qweight", "weight_packed")

Span = tuple[int, int]
"""A range [first, end)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some outputs (rows) and inputs (columns) of a matrix [out, in]."""

    checkpoint: Checkpoint
    name: str
    rows: Cut
    columns: Cut

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the whole matrix."""
        return self.rows[0], self.columns[0]

    def has(self, suffix: str) -> bool:
        """Whether the matrix has such a tensor."""
        return self.checkpoint.stored_type(f"{self.name}.{suffix}") is not None

    def read(
        self, suffix: str, shape: tuple[int, ...], types: tuple[str, ...], *cuts: Span | None
    ) -> torch.Tensor:
        """A tensor of the matrix as it is stored, or a slice of it."""
        return self.checkpoint.read_stored(f"{self.name}.{suffix}", shape, types, *cuts)

    def read_one(self, suffix: str, types: tuple[str, ...]) -> torch.Tensor:
        """A number of the matrix, of shape [] or [1], in float32 on the CPU."""
        stored = self.checkpoint.stored_shape(f"{self.name}.{suffix}")
        return self.read(suffix, () if stored == () else (1,), types).view(()).float().cpu()

    def groups(self, scheme: WeightScheme, suffix: str = "g_idx") -> torch.Tensor:
        """The group of each input [columns]: as stored (in any order), or one after the other."""
        if self.has(suffix):
            return self.read(suffix, self.shape[1:], NUMBERS, self.columns[1:]).long()
        inputs = torch.arange(*self.columns[1:], device=self.checkpoint.device)
        return inputs // (scheme.group or self.shape[1])

    def weight(
        self,
        kind: Kind,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        groups: torch.Tensor,
    ) -> QuantisedWeight:
        """The part, of scales and zeros [rows, groups] of all groups of the matrix: keeps those it needs."""
        used, groups = groups.unique(return_inverse=True)
        if len(used) and not 0 <= int(used[0]) <= int(used[-1]) < scales.shape[1]:
            problem = f"the groups of its inputs are not 0 to {scales.shape[1] - 1}"
            raise InputError(str(self.checkpoint.folder), self.name, problem, "download the checkpoint again")
        return QuantisedWeight(
            kind, codes, scales[:, used], None if zeros is None else zeros[:, used], groups
        )


def is_quantised(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a matrix is quantised. Its tensors tell, rather than the names that a config excludes."""
    packed = any(
        checkpoint.stored_type(f"{name}.{each}") is not None for each in ("qweight", "weight_packed")
    )
    return packed or checkpoint.stored_type(f"{name}.weight") in ("I8", "F8_E4M3")


def per_word(kind: Kind) -> int:
    """Codes in a word of 32 bits."""
    return _WORD_BITS // kind.bits


def words(span: Span, kind: Kind) -> Span:
    """The words that hold a range of codes."""
    return span[0] // per_word(kind), -(-span[1] // per_word(kind))


def unpacked(packed: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Words [n, words] int32 -> codes [n, codes] uint8, the lowest bits first."""
    # The lowest byte of a word comes first. A clone, because one column has any stride.
    stored = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if kind.bits == 8:
        return stored
    pairs = stored.short()  # each becomes two bytes, the lower one first
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def trimmed(codes: torch.Tensor, span: Span, kind: Kind) -> torch.Tensor:
    """The codes [n, span] of a range, from those of its words."""
    first = words(span, kind)[0] * per_word(kind)
    return codes[:, span[0] - first : span[1] - first]


def offset(stored: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Codes of values that are stored in 8 bits: integers from zero on, or the bits of floats."""
    if kind == Kind.FP8:
        return stored.view(torch.uint8)
    return (stored.short() + kind.middle).to(torch.uint8)
