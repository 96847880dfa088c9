"""Types of what users' files hold: names that are safe to show, numbers that are safe to compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ValidationError
from pydantic_core import PydanticCustomError

from cost_model.errors import InputError
from cost_model.printable import has_control_characters, one_line

Number = TypeVar("Number", int, float)


def between(least: float, most: float, or_zero: bool = False) -> AfterValidator:
    """Refuses numbers outside of [least, most], and nan; `or_zero` allows 0 as well, and makes it +0.

    The limits are far from anything real; they keep what is computed from the number finite.
    """
    described = f"{'0 or ' if or_zero else ''}from {least:g} to {most:g}"

    def check(value: Number) -> Number:
        if or_zero and value == 0:
            return abs(value)
        if least <= value <= most:
            return value
        raise PydanticCustomError("out_of_range", "Input should be {range}", {"range": described})

    return AfterValidator(check)


def _name(text: str) -> str:
    if has_control_characters(text):
        raise _refusal(text)
    return text


def _prose(text: str) -> str:
    if has_control_characters(text, layout=True):
        raise _refusal(text)
    return text


def _refusal(text: str) -> PydanticCustomError:
    return PydanticCustomError("control_characters", "{problem}", {"problem": _problem(text)})


def _problem(text: str) -> str:
    return f"has control characters: '{one_line(text)[:60]}'"


Name = Annotated[str, AfterValidator(_name)]
"""Text of one line without control characters."""

Prose = Annotated[str, AfterValidator(_prose)]
"""Text for people, of any number of lines, without control characters."""


def checked_name(text: str, source: str, key: str = "", remedy: str = "rename it") -> str:
    """A name that comes from elsewhere than a field: a file's or a folder's.

    Raises
    ------
    InputError : it has control characters
    """
    if has_control_characters(text):
        raise InputError(source, key, _problem(text), remedy)
    return text


def schema_error(error: ValidationError, source: str, remedy: str) -> InputError:
    """The first thing that is wrong with a file, as an InputError about `source`."""
    first = error.errors(include_url=False, include_input=False)[0]
    return InputError(source, key_text(first["loc"]), first["msg"][:200], remedy)


def key_text(path: Sequence[int | str]) -> str:
    """nodes[2].accelerators"""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{str(step)[:60]}" if text else str(step)[:60]
    return text
