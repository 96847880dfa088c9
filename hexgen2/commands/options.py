"""What several commands ask for in the same way."""

from __future__ import annotations

import math
from pathlib import Path

import click

from cost_model.errors import InputError


class _Positive(click.FloatRange):
    """A finite number above zero."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value, param, ctx) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


POSITIVE = _Positive()


def check_folder(path: Path | None) -> None:
    """Complain early about an output file (None: none) whose folder is missing.

    Raises
    ------
    InputError
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(str(path), "", "its folder does not exist", "create it first")
