"""API keys: which clients may send requests, each under a name that is safe to log."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cost_model.errors import InputError


def read_key(given: str, option: str, ask: Callable[[str], str]) -> str:
    """The key that an option gives: directly, as the first line of a file (@FILE), or typed at a prompt (-).

    Parameters
    ----------
    ask : shows a prompt and returns what is typed, without echoing it

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
    """Raise InputError if an operator key is malformed, or also a client's key."""
    _check(key, "--operator-key")
    if key in others.values():
        remedy = "give the operator a key of its own"
        raise InputError("--operator-key", "", "is also the key of a client", remedy)


def collect(keys: Iterable[str], path: Path | None = None) -> dict[str, str]:
    """Keys by name: those given as options, and those in a file with `name: key` or just a key on each line.

    Keys without a name are called key-1, key-2, ... in order; empty lines and lines starting with # are
    ignored.

    Raises
    ------
    InputError : the file cannot be read, a key is empty or has spaces, or a name or key occurs twice
    """
    found: dict[str, str] = {}
    for key in keys:
        _add(found, "", key, "--api-key")
    if path is None:
        return found
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        remedy = "name a text file with one key per line"
        raise InputError("--api-keys", str(path), f"cannot be read ({error})", remedy) from error
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, separator, key = line.partition(": ")
            _add(
                found, name.strip() if separator else "", key if separator else line, f"{path}, line {number}"
            )
    if not found:
        raise InputError(
            "--api-keys", str(path), "has no key", "write one key per line, or leave the option out"
        )
    return found


def _add(found: dict[str, str], name: str, key: str, where: str) -> None:
    name, key = name or f"key-{len(found) + 1}", key.strip()
    _check(key, where)
    if name in found:
        raise InputError(where, name, "names two keys", "give each key a name of its own")
    if key in found.values():
        raise InputError(where, name, "repeats another client's key", "give each client a key of its own")
    found[name] = key


def _check(key: str, where: str) -> None:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(where, "", "is not a valid key", "give printable ASCII characters without spaces")


class KeyRing:
    """Finds the name of a key in constant time, so that timing reveals nothing about the keys."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = [(name, _digest(key)) for name, key in keys.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, given: str) -> str | None:
        """The name of a key; None if the key is unknown."""
        digest, name = _digest(given), None
        for own, known in self._digests:
            if hmac.compare_digest(digest, known):
                name = own
        return name


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
