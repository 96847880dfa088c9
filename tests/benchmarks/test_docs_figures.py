"""Pages are filled with what commands print, and bad markup is named."""

from __future__ import annotations

import pytest

from benchmarks.docs_figures import DocsError, Page, differences, shortened

PAGE = """# Title

```
$ hexgen2 list \\
    models
name  size
...
total  2
```

<!-- figures of:
total: ^total ([\\d.]+)
-->

There are 2<!-- total --> of them, 2.0<!-- total -->x.
""".replace("\\\\", "\\")
OUTPUT = "name   size\nfirst  1\nsecond 2\ntotal  3\n"


def test_blocks_and_figures_are_those_of_the_output() -> None:
    page = Page("page.md", PAGE)
    text = page.filled({"hexgen2 list models": OUTPUT})
    assert "name   size\n...\ntotal  3\n```" in text
    assert "There are 3<!-- total --> of them, 3.0<!-- total -->x." in text
    assert len(differences(page, text)) == 3
    assert Page("page.md", text).filled({"hexgen2 list models": OUTPUT}) == text


def test_benchmarks_fill_blocks_as_commands_do() -> None:
    command = "python -m benchmarks.search.settings --runs 1"
    page = Page("page.md", f"```\n$ {command}\nseed 1\ntotal  2\n```\n")
    assert [part.command for part in page.parts] == [command]
    assert page.filled({command: "seed 1\nfirst  1\ntotal  3\n"}).split("\n")[2:5] == [
        "seed 1",
        "first  1",
        "total  3",
    ]


def test_parts_whose_command_was_not_run_stay() -> None:
    assert Page("page.md", PAGE).filled({}) == PAGE


def test_lines_between_two_ellipses_are_found_by_the_first_and_the_last() -> None:
    new = ["a 1", "b 2", "c 3", "d 4", "e 5", "    more", "f 6"]
    assert shortened(["...", "b 0", "d 0", "..."], new) == ["...", "b 2", "c 3", "d 4", "..."]
    assert shortened(["e 0", "    ...", "f 0"], new) == ["e 5", "    ...", "f 6"]
    assert shortened(["e 0", "    old", "..."], new) == ["e 5", "    more", "..."]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("total  2\n```", "sum  2\n```", "page.md:6: no line of the output begins with `sum` here"),
        ("total: ^total", "total: ^sum", "page.md:11: total is not in the output"),
        ("total: ^total", "total ^total", "page.md:11: .* is not `NAME: PATTERN`"),
        ("2<!-- total -->", "2<!-- sum -->", "page.md: no `figures of` names sum"),
        ("-->\n\nThere", "\n\nThere", "page.md:11: no `-->` follows"),
        ("```\n\n<!--", "\n\n<!--", "page.md:5: no ````` follows"),
    ],
)
def test_bad_markup_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in PAGE
    with pytest.raises(DocsError, match=message):
        Page("page.md", PAGE.replace(old, new)).filled({"hexgen2 list models": OUTPUT})


def test_figures_need_a_command() -> None:
    with pytest.raises(DocsError, match="no block above"):
        Page("page.md", "<!-- figures of:\na: b\n-->\n")
