"""Products with many weight matrices at once, each for some of the rows: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from runtime.engine.torch.linear import Linear, Product

Activation = Callable[[torch.Tensor], torch.Tensor]
"""From gates and ups, [rows, 2 x width], to [rows, width]."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer: how many there are, how many of them a token uses, and the width of each."""

    experts: int
    chosen: int
    width: int


class GroupedLinear:
    """Row r of x [n, in], sorted by group, times the matrix of its group -> [n, out].

    Where products of this kind can be `grouped`, one call of our own kernel multiplies all groups; otherwise
    there is one product per group that has rows.
    """

    def __init__(self, linears: Sequence[Product]) -> None:
        self._products = [each.product if isinstance(each, Linear) else each for each in linears]
        kinds = {type(product) for product in self._products}
        grouped = getattr(kinds.pop(), "grouped", None) if len(kinds) == 1 else None
        self._grouped = grouped(self._products) if grouped else None

    def __call__(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """`counts` are the rows of each group."""
        if self._grouped is not None:
            return self._grouped(x.contiguous(), counts)
        parts = zip(self._products, x.split(list(counts)), strict=True)
        return torch.cat([product(part) for product, part in parts if len(part)])


class Experts:
    """The experts of a layer that this rank holds.

    Parameters
    ----------
    first : number of the first one
    gate_up, down : their matrices, or the same part of each one's width
    """

    def __init__(
        self, first: int, gate_up: Sequence[Product], down: Sequence[Product], activate: Activation
    ) -> None:
        self._first, self._end = first, first + len(gate_up)
        self._gate_up, self._down, self._activate = GroupedLinear(gate_up), GroupedLinear(down), activate

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What these experts add to the output for x [tokens, hidden].

        Parameters
        ----------
        weights, chosen : of the experts that each token uses, and their numbers, [tokens, chosen]
        """
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self._end).tolist()
        before, held = sum(counts[: self._first]), counts[self._first : self._end]
        pairs = order[before : before + sum(held)]
        output = torch.zeros_like(x)
        if not len(pairs):
            return output
        tokens = pairs // chosen.shape[1]
        rows = self._down(self._activate(self._gate_up(x[tokens], held)), held)
        return output.index_add_(0, tokens, rows.mul_(weights.flatten()[pairs, None]).to(x.dtype))
