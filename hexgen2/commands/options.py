"""What several commands ask for in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cost_model.errors import InputError
from hexgen2.goal import LARGEST, SMALLEST

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Function = TypeVar("Function", bound=Callable[..., Any])
Settings = TypeVar("Settings", bound="DataclassInstance")


class Number(click.FloatRange):
    """A number in a range, which may have no end; nan is none."""

    def convert(self, value, param, ctx) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


POSITIVE = Number(SMALLEST, LARGEST)
"""A rate, a target, a time or a price: a number above zero that is safe to compute with."""

SEED = click.IntRange(0, 2**63 - 1)


def setting(
    defaults: DataclassInstance, flag: str, kind: click.ParamType, help: str
) -> Callable[[Function], Function]:
    """An option for a field of some settings: it is called like the field, and has its default."""
    default = getattr(defaults, flag.removeprefix("--").replace("-", "_"))
    return click.option(flag, type=kind, default=default, show_default=True, help=help)


def settings_of(kind: type[Settings], values: Mapping[str, Any], **others: Any) -> Settings:
    """Settings from the values of the options that are called like their fields, and from others."""
    named = {field.name: values[field.name] for field in fields(kind) if field.name in values}
    return kind(**named, **others)


def check_folder(path: Path | None) -> None:
    """Complain early about an output file (None: none) whose folder is missing.

    Raises
    ------
    InputError
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(str(path), "", "its folder does not exist", "create it first")
