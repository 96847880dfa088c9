"""Strict YAML: plain data only, and every error is an InputError.

The scalars are those of YAML 1.2's core schema. `3090:2` stays text (YAML 1.1 reads it as a number in
base 60), `no` stays text, `1e9` is a number. Duplicate keys, aliases and tags are refused.

Values are built from the parser's events, without a tree of nodes in between: a cluster file may have a
link for each of thousands of pairs of nodes, and a search with a time limit reads it within the limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import yaml
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

from cost_model.errors import InputError

MAX_YAML_BYTES = 1 << 20
_MAX_DEPTH = 100
"""Levels of nesting that are accepted."""
_TOO_DEEP = "is nested too deeply"
_CORE = "tag:yaml.org,2002:"


class _PythonParser(Reader, Scanner, Parser):
    """Turns text into events where PyYAML comes without libyaml."""

    def __init__(self, stream: str) -> None:
        Reader.__init__(self, stream)
        Scanner.__init__(self)
        Parser.__init__(self)


_Parser: Any = yaml.cyaml.CParser if yaml.__with_libyaml__ else _PythonParser  # type: ignore[attr-defined]
"""libyaml's is twenty times as fast."""


def _floating(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    f"{_CORE}null": (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    f"{_CORE}bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    f"{_CORE}int": (re.compile(r"[-+]?[0-9]+"), int),
    f"{_CORE}float": (
        re.compile(
            r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        _floating,
    ),
    f"{_CORE}str": (re.compile(r"(?!)"), str),
}
"""By tag: which plain text stands for a value of that kind (for text: none in particular), and its value."""


@lru_cache(4096)
def _plain(text: str) -> Any:
    """The value of a scalar without quotes: of the first kind whose pattern it matches, else the text."""
    for pattern, convert in _SCALARS.values():
        if pattern.fullmatch(text):
            return convert(text)
    return text


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that is not accepted."""

    def __init__(self, problem: str, event: Any) -> None:
        super().__init__(problem=problem, problem_mark=event.start_mark)


def _text(event: Any) -> str:
    """The text of a scalar."""
    text: str = event.value
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise _Refused("text with half a surrogate pair", event)
    return text


def _scalar(event: Any) -> Any:
    """The value of a scalar."""
    text, tag = _text(event), event.tag
    try:
        if tag is None or tag == "!":
            return _plain(text) if event.implicit[0] else text
        if tag not in _SCALARS:
            raise _Refused(f"the tag {tag[:60]!r} is not accepted", event)
        return _SCALARS[tag][1](text)
    except ValueError:
        raise _Refused("not a number", event) from None


def _collection(event: Any, kind: str, empty: Any) -> Any:
    """An empty list or mapping, to be filled."""
    if event.tag not in {None, "!", f"{_CORE}{kind}"}:
        raise _Refused(f"the tag {event.tag[:60]!r} is not accepted", event)
    return empty


def _document(parser: Any) -> Any:
    """The value of the only document of a stream of events; None if there is none.

    Raises
    ------
    yaml.YAMLError : where the text is not YAML, or not accepted
    """
    document: list[Any] = []
    open_collections: list[Any] = [document]
    collection: Any = document
    key: str | None = None
    while True:
        event = parser.get_event()
        kind = type(event)
        if kind is yaml.ScalarEvent:
            if key is None and type(collection) is dict:
                key = _key(event, collection)
                continue
            value = _scalar(event)
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            if key is None and type(collection) is dict:
                raise _Refused("a key must be plain text", event)
            mapping = kind is yaml.MappingStartEvent
            value = _collection(event, "map", {}) if mapping else _collection(event, "seq", [])
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            open_collections.pop()
            collection = open_collections[-1]
            continue
        elif kind is yaml.AliasEvent:
            raise _Refused("aliases are not accepted", event)
        elif kind is yaml.StreamEndEvent:
            return document[0] if document else None
        elif kind is yaml.DocumentStartEvent and document:
            raise _Refused("a second document begins", event)
        else:
            continue
        if key is None:
            collection.append(value)
        else:
            collection[key] = value
            key = None
        if kind is not yaml.ScalarEvent:
            if len(open_collections) > _MAX_DEPTH:
                raise _Refused(_TOO_DEEP, event)
            open_collections.append(value)
            collection = value


def _key(event: Any, mapping: dict[str, Any]) -> str:
    """The key that a scalar stands for: its text, whatever it looks like."""
    key = _text(event)
    if key in mapping:
        raise _Refused(f"duplicate key {key[:60]!r}", event)
    return key


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """The mapping at the top level of a YAML text.

    Raises
    ------
    InputError : not YAML, empty, not a mapping, duplicate keys, aliases, tags; key is the line
    """
    try:
        data = _document(_Parser(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not valid YAML"
        if "nesting depth" in str(problem):  # libyaml has a limit of its own.
            problem = _TOO_DEEP
        raise InputError(source, where, str(problem), _yaml_remedy(str(problem))) from None
    if data is None:
        raise InputError(source, "", "is empty", "start it with `name:` and `nodes:`")
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else "a single value"
        raise InputError(source, "", f"has {kind} at the top level", "start it with `name:` and `nodes:`")
    return data


def _yaml_remedy(problem: str) -> str:
    """What to do about a problem that the parser found."""
    if "duplicate" in problem:
        return "keep one of them"
    if "nested" in problem:
        return "a cluster needs a handful of levels"
    if "alias" in problem:
        return "write the value out where it is used"
    if "\\t" in problem:
        return "indent with spaces, not tabs"
    if "document" in problem:
        return "keep one document in a file"
    if "tag" in problem:
        return "remove the `!`: plain YAML values only"
    return "correct the YAML at that line"
