"""Which models the torch engine runs, in which formats, on replicas of which kinds: tokens against
transformers.

    python -m benchmarks.engine.model_matrix [--models WORDS] [--formats float32 bfloat16 packed]

Tiny random checkpoints of every family (tests/support/checkpoints.py), greedy tokens after prompts of 1 to 40
tokens. Each kind of replica is real worker processes: colocated; a prefill and a decode replica, between
which KV caches move (P/D); the same where one has a stage of two tensor-parallel ranks before one of one, and
the other two stages, in both directions (uneven); a replica whose KV heads are partly on attention workers;
and replicas with overlapping ranges of layers. `equal`: all tokens are those of transformers. `ties`:
tokens differ where scores nearly tie: in exact arithmetic they lose by no more than transformers' own scores
in this format are off by, or (where rounding changes which experts compute) do so no more often than these.
`WRONG`: neither. A number stands for a refusal, whose message is below the table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cost_model.errors import InputError

COLUMNS = ("colocated", "P/D", "uneven", "attention workers", "ranges")
NOT_RUN = ("minimax-m2.5",)
"""Models of families that searches plan and the torch engine has no code for."""


class Table:
    """Rows of verdicts, and the refusals that they refer to."""

    def __init__(self) -> None:
        self._refusals = list[str]()
        self.row("family", "format", {column: column for column in COLUMNS})

    def row(self, family: str, kind: str, cells: Mapping[str, str | InputError | None]) -> None:
        shown = ((self._shown(cells.get(column)), max(len(column), 7) + 2) for column in COLUMNS)
        print(f"{family:13}{kind:10}" + "".join(f"{text:>{width}}" for text, width in shown), flush=True)

    def notes(self) -> None:
        for number, text in enumerate(self._refusals, 1):
            print(f"({number}) {text}")

    def _shown(self, cell: str | InputError | None) -> str:
        if cell is None or isinstance(cell, str):
            return cell or "-"
        text = f"{cell.problem}; {cell.remedy}"
        if text not in self._refusals:
            self._refusals.append(text)
        return f"({self._refusals.index(text) + 1})"


def main() -> None:
    """Print one row after the other."""
    # Worker processes import this module again, so it imports what is slow only here.
    from benchmarks.engine.model_cells import PACKED, cells, checkpoints, refusal

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="*", default=sorted(checkpoints.WRITERS))
    parser.add_argument("--formats", nargs="*", default=["float32", "bfloat16", "packed"])
    options = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        for family, kind in product(options.models, options.formats):
            if kind != "packed":
                table.row(family, kind, cells(Path(folder), family, kind))
            elif family in PACKED:
                table.row(family, PACKED[family][0], cells(Path(folder), family, kind))
        for name in NOT_RUN:
            table.row(name, "any", dict.fromkeys(COLUMNS, refusal(Path(folder), name)))
    table.notes()


if __name__ == "__main__":
    main()
