"""Where steps that are replayed find the blocks of their sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class BlockTables:
    """Block tables of a step's sequences on the device, always in the same place. Only what has changed is
    written.

    Attributes
    ----------
    device : [lines, most] int32
    """

    def __init__(self, lines: int, most: int, device: torch.device) -> None:
        self._here = np.zeros((lines, most), dtype=np.int32)
        self._apart = device.type != "cpu"
        self.device = torch.from_numpy(self._here)
        if self._apart:
            self.device = torch.zeros((lines, most), dtype=torch.int32, device=device)
        self._known: list[tuple[Sequence[int], int]] = []
        self._width = 0

    def put(self, tables: Sequence[Sequence[int]]) -> None:
        """Have these in the first lines. A table only grows; one that begins anew is another object."""
        known, changed = self._known, False
        for line, table in enumerate(tables):
            count = min(len(table), self.device.shape[1])  # It may have room for more than is replayed.
            if line < len(known):
                before, there = known[line]
                if before is table and there == count:
                    continue
                first = there if before is table else 0
                known[line] = table, count
            else:
                first = 0
                known.append((table, count))
            self._here[line, first:count] = table[first:count]
            self._width, changed = max(self._width, count), True
        if changed and self._apart:
            some = np.ascontiguousarray(self._here[: len(tables), : self._width])
            self.device[: len(tables), : self._width].copy_(torch.from_numpy(some))
