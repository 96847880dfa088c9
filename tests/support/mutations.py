"""Hypothesis strategies that damage valid trees, bytes and files in a few places."""

from __future__ import annotations

import copy

from hypothesis import strategies as st

EXTREME = [
    *(0, -0.0, -1, 1, 5e-324, 1e-320, 1e-300, 1e-12, 1e-9, 1e-6, 1e6, 1e9, 1e12, 1e15, 1e19, 1e300, 1e308),
    *(float("inf"), float("-inf"), float("nan"), True, False, 2**31, 2**63, 2**64, 10**19, 10**400),
]
HOSTILE_TEXT = [
    *(
        "",
        "\x00",
        "\x1b[2J",
        "a\x1b]0;t\x07b",
        "\x7f",
        "\x9b31m",
        "\u202eevil",
        "\u2066x",
        "a\u2028b",
        "\r\n",
    ),
    *("[/bold]", "[link=file:///]x", ":smile:", "{x}", "%s", "..", "a/b", "/", "é", "😀", "x" * 300),
    *("nan", "1e400", "H100:0", "H100:2", "a", "a/0", "a/1", "b/0", "prefill-0", "decode-0", "calibrated"),
]


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


LEAVES = (
    st.sampled_from(EXTREME)
    | st.sampled_from(HOSTILE_TEXT)
    | st.sampled_from([None, [], {}, [[]], [None], {"": 0}])
    | st.floats()
    | st.integers()
    | st.text(max_size=8)
)
VALUES = (LEAVES | st.just(_nested(30)) | st.lists(LEAVES, max_size=3)).map(copy.deepcopy)


NEAR = (1e-12, 1e-9, 1e-6, 1e-3, 0.5, 0.999, 1.001, 2.0, 1e3, 1e6, 1e9)
"""Factors that may leave a number within its allowed range."""


def _similar(draw, value):
    """Another value of the same type, which is more likely to be accepted."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 64, 10**4, 10**6, 10**7, 10**8]))
    if isinstance(value, float):
        return draw(st.sampled_from([*NEAR, *(value * factor for factor in NEAR)]))
    if isinstance(value, str):
        return draw(st.sampled_from([*HOSTILE_TEXT, value.upper(), f"{value}x"]))
    if isinstance(value, list) and value:
        return draw(st.sampled_from([value[1:], value[:-1], value[::-1], value + copy.deepcopy(value)]))
    return copy.deepcopy(draw(LEAVES))


def places(tree, path=()):
    """The paths of every value in a tree of dicts and lists."""
    steps = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for step, value in steps:
        yield (*path, step)
        yield from places(value, (*path, step))


ACTIONS = ["similar"] * 6 + ["number"] * 2 + ["replace", "remove", "add", "rename"]


@st.composite
def mutated(draw, original, most: int = 3):
    """The tree with one to `most` values replaced, removed, duplicated, renamed, or with another one
    added."""
    tree = copy.deepcopy(original)
    for _ in range(draw(st.sampled_from([1] * most + list(range(1, most + 1))))):
        paths = list(places(tree))
        if not paths:
            return tree
        *parents, last = draw(st.sampled_from(paths))
        target = tree
        for step in parents:
            target = target[step]
        action = draw(st.sampled_from(ACTIONS))
        if action == "similar":
            target[last] = _similar(draw, target[last])
        elif action == "number" and isinstance(target[last], int | float):
            target[last] = draw(st.sampled_from(EXTREME))
        elif action == "remove":
            del target[last]
        elif action == "add" and isinstance(target, list):
            target.append(copy.deepcopy(target[last]))
        elif action == "add":
            target[draw(st.sampled_from(HOSTILE_TEXT) | st.text(max_size=6))] = draw(VALUES)
        elif action == "rename" and isinstance(target, dict):
            target[draw(st.sampled_from(HOSTILE_TEXT) | st.text(max_size=6))] = target.pop(last)
        else:
            target[last] = draw(VALUES)
    return tree


JUNK = [
    *(b":", b"\t", b"&a ", b"*a", b"!!", b"- ", b"\xff", b"\xc3", b"\0", b"{", b"[", b"]", b"'", b'"', b"\n"),
    *(b",", b"\r", b"\xef\xbb\xbf", b"\x1b[2J", b"\xc2\x9b", b"\xe2\x80\xae", b"\\u001b", b"\\ud800", b"-"),
    *(b"!!python/object:os.system ", b"<<: "),
    *(b"0", b"9" * 400, b"1e-320", b"1e308", b"1e400", b"NaN", b"Infinity", b"true", b"null", b"[" * 2000),
]


@st.composite
def mutated_bytes(draw, original: bytes):
    """The bytes with a few of them overwritten with junk, or cut off."""
    raw = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 8))] = draw(st.sampled_from(JUNK))
    return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 9)) == 0 else raw)
