"""Field types for users' files: names that are safe to show, numbers that are safe to compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ValidationError
from pydantic_core import PydanticCustomError

from cost_model.errors import InputError
from cost_model.printable import has_control_characters, one_line

Number = TypeVar("Number", int, float)


def between(least: float, most: float, or_zero: bool = False) -> AfterValidator:
    """A validator that rejects numbers outside [least, most], and nan; `or_zero` also allows 0, as +0.

    The limits are far from realistic values; they keep results that are computed from the number finite.
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
    """Refuse text with control characters, line breaks included."""
    if has_control_characters(text):
        raise _refusal(text)
    return text


def _prose(text: str) -> str:
    """Refuse text with control characters, except line breaks and tabs."""
    if has_control_characters(text, layout=True):
        raise _refusal(text)
    return text


def _refusal(text: str) -> PydanticCustomError:
    """The error of a text with control characters."""
    return PydanticCustomError("control_characters", "{problem}", {"problem": _problem(text)})


def _problem(text: str) -> str:
    """The problem of a text with control characters."""
    return f"has control characters: '{one_line(text)[:60]}'"


Name = Annotated[str, AfterValidator(_name)]
"""Text of one line without control characters."""

Prose = Annotated[str, AfterValidator(_prose)]
"""Text for people, of any number of lines, without control characters."""


def checked_name(text: str, source: str, key: str = "", remedy: str = "rename it") -> str:
    """A name that does not come from a field, such as that of a file or folder.

    Raises
    ------
    InputError : it has control characters
    """
    if has_control_characters(text):
        raise InputError(source, key, _problem(text), remedy)
    return text


def schema_error(error: ValidationError, source: str, remedy: str) -> InputError:
    """The first of pydantic's errors, as an InputError about `source`."""
    first = error.errors(include_url=False, include_input=False)[0]
    return InputError(source, key_text(first["loc"]), first["msg"][:200], remedy)


def key_text(path: Sequence[int | str]) -> str:
    """A path as text, for example nodes[2].accelerators."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{str(step)[:60]}" if text else str(step)[:60]
    return text
