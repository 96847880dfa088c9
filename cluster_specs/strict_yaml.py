"""Strict YAML: plain data only, and every error is an InputError.

The scalars are those of YAML 1.2's core schema. `3090:2` stays text (YAML 1.1 reads it as a number in
base 60), `no` stays text, `1e9` is a number. Duplicate keys, aliases and tags are refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from cost_model.errors import InputError

MAX_YAML_BYTES = 1 << 20
_MAX_DEPTH = 100
"""Levels of nesting: a limit of our own, because Python's on recursion depends on the caller's stack."""
_TOO_DEEP = "is nested too deeply"


class _PythonParser(Reader, Scanner, Parser):
    """Turns text into events where PyYAML comes without libyaml."""

    def __init__(self, stream: str) -> None:
        Reader.__init__(self, stream)
        Scanner.__init__(self)
        Parser.__init__(self)


_Parser: Any = yaml.cyaml.CParser if yaml.__with_libyaml__ else _PythonParser  # type: ignore[attr-defined]
"""libyaml's is twenty times as fast: a cluster file may have thousands of lines."""


class _StrictLoader(Composer, _Parser, SafeConstructor, Resolver):  # type: ignore[misc]
    """A loader with only the constructors and scalar patterns registered below, none of the inherited
    ones."""

    _depth = 0

    def __init__(self, stream: str) -> None:
        _Parser.__init__(self, stream)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases and deep nesting."""
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise ConstructorError(None, None, "aliases are not accepted", mark)
        if self._depth == _MAX_DEPTH:
            raise ConstructorError(None, None, _TOO_DEEP, mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def text(self, node: yaml.Node) -> str:
        value = self.construct_scalar(node)  # type: ignore[arg-type]
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ConstructorError(None, None, "text with half a surrogate pair", node.start_mark)
        return value

    def null(self, node: yaml.Node) -> None:
        return None

    def boolean(self, node: yaml.Node) -> bool:
        return self.text(node).lower() == "true"

    def integer(self, node: yaml.Node) -> int:
        return self._number(node, int)

    def floating(self, node: yaml.Node) -> float:
        return self._number(node, lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")))

    def _number(self, node: yaml.Node, convert: Any) -> Any:
        """The number that the text is, in lower case."""
        try:
            return convert(self.text(node).lower())
        except ValueError:
            raise ConstructorError(None, None, "not a number", node.start_mark) from None

    def sequence(self, node: yaml.Node) -> list[Any]:
        return self.construct_sequence(node, deep=True)  # type: ignore[arg-type]

    def mapping(self, node: yaml.Node) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise ConstructorError(None, None, "expected a mapping", node.start_mark)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            key = self.text(key_node)
            if key in result:
                raise ConstructorError(None, None, f"duplicate key {key[:60]!r}", key_node.start_mark)
            result[key] = self.construct_object(value_node, deep=True)
        return result


_StrictLoader.yaml_implicit_resolvers = {}
_StrictLoader.yaml_constructors = {}
for _tag, _constructor in {
    "null": _StrictLoader.null,
    "bool": _StrictLoader.boolean,
    "int": _StrictLoader.integer,
    "float": _StrictLoader.floating,
    "str": _StrictLoader.text,
    "seq": _StrictLoader.sequence,
    "map": _StrictLoader.mapping,
}.items():
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _constructor)
_StrictLoader.yaml_constructors[None] = yaml.SafeLoader.construct_undefined

for _tag, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]:
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """The mapping at the top level of a YAML text.

    Raises
    ------
    InputError : not YAML, empty, not a mapping, duplicate keys, aliases, tags; key is the line
    """
    try:
        data = yaml.load(text, Loader=_StrictLoader)
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
    if "tag" in problem:
        return "remove the `!`: plain YAML values only"
    return "correct the YAML at that line"
