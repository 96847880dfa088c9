"""From a pydantic error to a one-line InputError: file, key, problem, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cost_model.errors import InputError
from cost_model.fields import key_text


def input_error(error: ValidationError, data: Any, source: str, model: type[BaseModel]) -> InputError:
    """The most informative error of `data` against `model`, as an InputError about `source`."""
    details = min(error.errors(include_url=False), key=lambda e: _rank(e, data))
    path = list(_data_path(details["loc"], data))
    key = key_text(path)
    problem = details["msg"].removeprefix("Input should be ")
    if details["type"] == "missing":
        return InputError(source, key, "is missing", "add it")
    if details["type"] == "extra_forbidden":
        known = _known_keys(model, path[:-1])
        near = difflib.get_close_matches(str(path[-1])[:100], known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return InputError(source, key, "unknown key", hint)
    if details["type"] == "control_characters":
        return InputError(source, key, problem, "leave them out")
    if details["type"] == "too_short":
        return InputError(source, key, "is empty", "list at least one")
    shown = repr(details["input"])
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    if details["type"] == "string_type":
        return InputError(
            source, key, f"is {shown}, not text", "write text, in quotes if it looks like a number"
        )
    if details["type"] == "string_pattern_mismatch":
        return InputError(
            source, key, f"{shown} has a space or a slash in it", "use letters, digits and dashes"
        )
    if key.endswith("interconnect"):
        remedy = "use nvlink, pcie3, pcie4, pcie5, shared-memory or {bandwidth_gbyte_s: ..., latency_us: ...}"
        return InputError(source, key, f"{shown} is not an interconnect", remedy)
    return InputError(source, key, f"is {shown}", f"it should be {problem}")


def _rank(details: ErrorDetails, data: Any) -> tuple[bool, bool]:
    """The most informative first: in the right union branch; an unknown key before a missing one."""
    return _branch_mismatch(details, data), details["type"] != "extra_forbidden"


def _data_path(location: tuple[int | str, ...], data: Any) -> Iterator[int | str]:
    """The part of a pydantic location that exists in the data, without names of union branches."""
    for position, step in enumerate(location):
        last = position == len(location) - 1
        if isinstance(data, dict):
            if step in data:
                yield step
                data = data[step]
            elif last and isinstance(step, str) and not _is_branch(step) and step != "[key]":
                yield step
        elif isinstance(data, list) and isinstance(step, int) and step < len(data):
            yield step
            data = data[step]


def _is_branch(step: int | str) -> bool:
    """Whether a step of a location is the name of a union branch."""
    return isinstance(step, str) and (
        step.startswith(("literal[", "list[")) or step in {"InterconnectSpec", "str"}
    )


def _branch_mismatch(details: ErrorDetails, data: Any) -> bool:
    """Whether the error is from a union branch that the data's own type rules out."""
    wanted: type | None = None
    value = data
    for step in details["loc"]:
        if _is_branch(step) and not (isinstance(value, dict) and step in value):
            text = str(step)
            wanted = dict if text == "InterconnectSpec" else list if text.startswith("list[") else str
            break
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return False
    return wanted is not None and not isinstance(value, wanted)


def _known_keys(model: type[BaseModel], path: list[int | str]) -> list[str]:
    """The keys that the spec allows at `path`."""
    current: type[BaseModel] | None = model
    annotation: Any = model
    for step in path:
        if isinstance(step, int):
            continue
        if current is not None:
            annotation = next(
                (f.annotation for n, f in current.model_fields.items() if (f.alias or n) == step), None
            )
        current = _model_in(annotation)
        if get_origin(annotation) is dict:
            current = None
            annotation = get_args(annotation)[1]
    current = current or _model_in(annotation)
    return [f.alias or n for n, f in current.model_fields.items()] if current else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model class inside an annotation such as list[Model] or Literal | Model."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, UnionType):
        return next((m for a in get_args(annotation) if (m := _model_in(a)) is not None), None)
    return None
