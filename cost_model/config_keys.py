"""The keys of a Hugging Face config.json, read with the errors that a user can act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cost_model.errors import InputError

_LARGEST = 10**7


@dataclass(frozen=True)
class ConfigKeys:
    """The raw keys of a config, or of the part of it that errors name with `prefix`."""

    raw: dict[str, Any]
    source: str
    prefix: str = ""

    def error(self, key: str, problem: str, remedy: str) -> InputError:
        """An error about a key of this file."""
        return InputError(self.source, self.prefix + key, problem, remedy)

    def integer(self, *keys: str, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        """The first of `keys` that is there, as a whole number from `least` to `most`."""
        key = next((k for k in keys if self.raw.get(k) is not None), None)
        if key is None:
            if default is not None:
                return default
            raise self.error(keys[0], "is missing", "take the config.json of the model's own folder")
        value = self.raw[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, f"is {shown(value)}", f"it must be a whole number from {least} to {most}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean key."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {shown(value)}", "it must be true or false")
        return value

    def refuse(self, key: str, unwanted: bool) -> None:
        """A variant that the counts and the engines do not cover."""
        if self.flag(key, not unwanted) == unwanted:
            raise self.error(key, f"{str(unwanted).lower()} is not supported", "choose another model")

    def require(self, key: str, expected: int) -> None:
        """A number of which the counts and the engines cover one value only."""
        found = self.integer(key, default=expected, least=0)
        if found != expected:
            raise self.error(key, f"{found} is not supported, only {expected}", "choose another model")


def shown(value: Any) -> str:
    """A value as it is shown in an error."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."
