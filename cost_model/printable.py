"""Text that is safe to print: control characters become visible escapes.

Names come from files that somebody else may have written. An escape sequence in a name could move the cursor,
change colours or overwrite what the terminal shows, and an override of the writing direction makes one text
look like another."""

from __future__ import annotations

import re

_CONTROL = (
    "\x00-\x1f\x7f-\x9f"  # C0, DEL and C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # writing direction
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # halves of surrogate pairs, as in file names that are not UTF-8
)
_ANY = re.compile(f"[{_CONTROL}]")
_ANY_BUT_LAYOUT = re.compile(f"(?![\n\t])[{_CONTROL}]")
_SPACES = re.compile(r"[ \t\n\r]+")


def has_control_characters(text: str, layout: bool = False) -> bool:
    """Whether the text has any; line breaks and tabs count too, unless `layout` allows them."""
    return (_ANY_BUT_LAYOUT if layout else _ANY).search(text) is not None


def printable(text: str) -> str:
    r"""The text with control characters as escapes (\x1b, \u202e); line breaks and tabs stay."""
    return _ANY_BUT_LAYOUT.sub(_escaped, text)


def one_line(text: str) -> str:
    """The text in one line: runs of white space are one space, control characters are escapes."""
    return _ANY.sub(_escaped, _SPACES.sub(" ", text).strip(" "))


def printable_json(text: str) -> str:
    """The same JSON text, with control characters inside its strings as JSON escapes."""
    return _ANY_BUT_LAYOUT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(found: re.Match[str]) -> str:
    """The escape of one control character."""
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
