"""API keys: who may ask, each with a name that logs and metrics may show."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cost_model.errors import InputError


def read_key(given: str, option: str, ask: Callable[[str], str]) -> str:
    """A key as an option has it: itself, the first line of a file (@FILE), or what the operator types (-).

    Parameters
    ----------
    ask : shows a question and returns the answer, which nobody sees

    Raises
    ------
    InputError : the file cannot be read
    """
    if given == "-":
        return ask(f"{option[2:]}")
    if not given.startswith("@"):
        return given
    try:
        return (Path(given[1:]).read_text().splitlines() or [""])[0].strip()
    except (OSError, ValueError) as error:
        remedy = "name a text file whose first line is the key"
        raise InputError(option, given, f"cannot be read ({error})", remedy) from error


def check_operator_key(key: str, others: Mapping[str, str]) -> None:
    """Raise InputError if a key is not fit for the operator: none, or a client's."""
    _check(key, "--operator-key")
    if key in others.values():
        remedy = "give the operator a key of its own"
        raise InputError("--operator-key", "", "is also the key of a client", remedy)


def collect(keys: Iterable[str], path: Path | None = None) -> dict[str, str]:
    """Keys by name: those given bare, and those of a file with `name: key` or a bare key on each line.

    Bare keys are named key-1, key-2, ... in their order; empty lines and lines that begin with # say nothing.

    Raises
    ------
    InputError : the file cannot be read, a key is empty or has spaces, a name or key is there twice
    """
    found: dict[str, str] = {}
    for key in keys:
        _add(found, "", key, "--api-key")
    if path is None:
        return found
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        remedy = "name a text file with one key a line"
        raise InputError("--api-keys", str(path), f"cannot be read ({error})", remedy) from error
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, separator, key = line.partition(": ")
            _add(
                found, name.strip() if separator else "", key if separator else line, f"{path}, line {number}"
            )
    if not found:
        raise InputError(
            "--api-keys", str(path), "has no key", "write one key a line, or leave the option out"
        )
    return found


def _add(found: dict[str, str], name: str, key: str, where: str) -> None:
    name, key = name or f"key-{len(found) + 1}", key.strip()
    _check(key, where)
    if name in found:
        raise InputError(where, name, "names two keys", "give each key a name of its own")
    if key in found.values():
        raise InputError(where, name, "has a key that is there already", "give each client a key of its own")
    found[name] = key


def _check(key: str, where: str) -> None:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(where, "", "is no key", "give printable ASCII characters without spaces")


class KeyRing:
    """Finds the name of a key, in a time that says nothing about the keys."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = [(name, _digest(key)) for name, key in keys.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, given: str) -> str | None:
        """The name of a key; None if it is none of ours."""
        digest, name = _digest(given), None
        for own, known in self._digests:
            if hmac.compare_digest(digest, known):
                name = own
        return name


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
