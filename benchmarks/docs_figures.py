"""Fill the README and docs/ with what commands print, or check that they agree.

    python -m benchmarks.docs_figures [--check] [--all | --only WORDS]

- A fenced block whose first line is `$ hexgen2 ...` or `$ python -m benchmarks. ...` shows what that command
  prints; `...` stands for lines left out. The lines from the first to the last between two of these are found
  again by their first words.
- `<!-- figures of: COMMAND`, then lines `NAME: PATTERN`, then `-->` name figures: what the pattern's group
  matches in the output. A space matches any number of spaces. `11.2<!-- NAME -->` in the text is that figure,
  with as many decimals as it has there. Without a command, the figures are those of the block above.

All commands run in one folder, those of README.md first, so that one can read what another wrote with -o. A
block or figures after a line `<!-- slow -->` are left to --all, or to --only with words of their command.
Commands that need a file which nobody wrote are named and left as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ELLIPSIS = "..."
PROMPTS = ("$ hexgen2 ", "$ python -m benchmarks.")
SLOW = "<!-- slow -->"
NAMED = "<!-- figures of:"
WRAPPED = re.compile(r" {4,}\S")
"""A line that continues the one above it, or an indented ellipsis."""
FIGURE = re.compile(r"(?P<shown>[\d.,]+)(?P<unit>[^\s<]*)<!-- (?P<name>[\w-]+) -->")
INPUTS = ("tables", "runs.csv", "trace.csv")
"""Files that a reader brings."""


class DocsError(Exception):
    """What is wrong with a page, in one line that begins with its file and line."""


@dataclass
class Part:
    """Lines [begin, end) of a page that a command fills, or that name its figures."""

    command: str
    begin: int
    end: int
    slow: bool
    patterns: dict[str, str] = field(default_factory=dict)


class Page:
    """A page and the parts that commands fill."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.lines = name, text.split("\n")
        self.parts = list(self._parts())

    def filled(self, outputs: dict[str, str]) -> str:
        """The page's text with what the commands printed; parts without an output stay as they are."""
        lines, values = list(self.lines), dict[str, str]()
        for part in reversed(self.parts):
            if part.command not in outputs:
                continue
            if not part.patterns:
                lines[part.begin : part.end] = self._block(part, outputs[part.command])
            for name, pattern in part.patterns.items():
                found = re.search(pattern.replace(" ", " +"), outputs[part.command], re.MULTILINE)
                if found is None:
                    raise self._error(part.begin, f"{name} is not in the output: mend its pattern")
                values[name] = found[1]
        known = {name for part in self.parts for name in part.patterns}

        def now(found: re.Match[str]) -> str:
            if found["name"] not in known:
                raise DocsError(
                    f"{self.name}: no `figures of` names {found['name']}: add it, or mend the name"
                )
            value = like(found["shown"], values.get(found["name"], found["shown"]))
            return f"{value}{found['unit']}<!-- {found['name']} -->"

        return FIGURE.sub(now, "\n".join(lines))

    def _error(self, line: int, what: str) -> DocsError:
        return DocsError(f"{self.name}:{line + 1}: {what}")

    def _parts(self) -> Iterator[Part]:
        block: Part | None = None
        for at, line in enumerate(self.lines):
            slow = at > 0 and self.lines[at - 1].strip() == SLOW
            if line.strip() == "```" and "".join(self.lines[at + 1 : at + 2]).startswith(PROMPTS):
                last = at + 1
                while self.lines[last].endswith("\\"):
                    last += 1
                end = self._until(last, "```")
                command = joined(self.lines[at + 1 : last + 1]).removeprefix("$ ")
                block = Part(command, last + 1, end, slow)
                yield block
            elif line.startswith(NAMED):
                end = self._until(at, "-->")
                command, *named = [line.removeprefix(NAMED).strip(), *self.lines[at + 1 : end]]
                while command.endswith("\\"):
                    command = joined([command, named.pop(0)])
                if not command and block is None:
                    raise self._error(at, "there is no block above: name a command")
                patterns = dict(self._named(at, text) for text in named)
                yield Part(command or block.command, at, end, slow, patterns)  # type: ignore[union-attr]

    def _until(self, at: int, end: str) -> int:
        for k in range(at, len(self.lines)):
            if self.lines[k].strip() == end:
                return k
        raise self._error(at, f"no `{end}` follows: add one on a line of its own")

    def _named(self, at: int, text: str) -> tuple[str, str]:
        name, colon, pattern = text.strip().partition(": ")
        if not colon:
            raise self._error(at, f"`{text.strip()}` is not `NAME: PATTERN`")
        return name, pattern

    def _block(self, part: Part, output: str) -> list[str]:
        try:
            return shortened(self.lines[part.begin : part.end], output.rstrip("\n").split("\n"))
        except LookupError as error:
            raise self._error(part.begin, f"{error.args[0]}: choose other lines to show") from None


def joined(lines: list[str]) -> str:
    """A command in one line, from lines that backslashes join."""
    return " ".join(" ".join(line.rstrip().removesuffix("\\") for line in lines).split())


def like(shown: str, value: str) -> str:
    """A figure with as many decimals as the page shows.

    >>> like("362", "361.8"), like("11.2", "7")
    ('362', '7.0')
    """
    return f"{float(value.replace(',', '')):.{len(shown.partition('.')[2])}f}"


def shortened(old: list[str], new: list[str]) -> list[str]:
    """The lines of an output that a block shows, found again by the first words of what it showed so far."""
    output, at, lines = list(wrapped([line.rstrip() for line in new])), 0, list[str]()
    for run in runs(old):
        if run[0][0].strip() == ELLIPSIS:
            lines.append(run[0][0])
            continue
        first = with_first_word(output, run[0][0], at)
        last = first if len(run) == 1 else with_first_word(output, run[-1][0], first + 1)
        for k in range(first, last + 1):
            cut = k == last and run[-1][-1].strip() == ELLIPSIS
            lines += [output[k][0], run[-1][-1]] if cut else output[k]
        at = last + 1
    return lines


def wrapped(lines: list[str]) -> Iterator[list[str]]:
    """Each line with those that it wraps into."""
    begin = 0
    for k in range(1, len(lines) + 1):
        if k == len(lines) or not WRAPPED.match(lines[k]):
            yield lines[begin:k]
            begin = k


def runs(old: list[str]) -> Iterator[list[list[str]]]:
    """Runs of lines without an ellipsis in between, and the ellipses."""
    run: list[list[str]] = []
    for lines in wrapped(old):
        if lines[0].strip() == ELLIPSIS and run:
            yield run
            run = []
        run.append(lines)
        if lines[-1].strip() == ELLIPSIS:
            yield run
            run = []
    if run:
        yield run


def with_first_word(output: list[list[str]], line: str, at: int) -> int:
    """The next line from `at` on that begins with the same word."""
    word = line.split()[0]
    for k in range(at, len(output)):
        if output[k][0].split()[:1] == [word]:
            return k
    raise LookupError(f"no line of the output begins with `{word}` here")


def fill(pages: list[Page], slow_too: bool, only: str = "") -> tuple[dict[str, str], list[str]]:
    """Each page's text as it should be, and the commands that were left out: slow ones, and those without the
    words of `only`."""
    outputs, left = dict[str, str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for page in pages:
            for part in page.parts:
                if part.command in outputs or part.command in left:
                    continue
                words = shlex.split(part.command)
                if (part.slow and not slow_too) or only not in part.command or set(words) & set(INPUTS):
                    left.append(part.command)
                    continue
                module = words[2:] if words[0] == "python" else words
                done = subprocess.run(
                    [sys.executable, "-m", *module],
                    cwd=folder,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    said = (done.stderr.strip() or "nothing said").split("\n")[-1]
                    raise DocsError(f"{page.name}:{part.begin + 1}: `{part.command}` fails: {said}")
                outputs[part.command] = done.stdout
    return {page.name: page.filled(outputs) for page in pages}, left


def read(root: Path = ROOT) -> list[Page]:
    """The README and the pages of docs/."""
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [Page(str(path.relative_to(root)), path.read_text()) for path in paths]


def differences(page: Page, text: str) -> list[str]:
    """A line for each line of a page that a command prints otherwise."""
    new = text.split("\n")
    if len(new) != len(page.lines):
        return [f"{page.name}: commands print {len(new) - len(page.lines):+} lines"]
    both = enumerate(zip(page.lines, new, strict=True), start=1)
    return [f"{page.name}:{k}: the page has `{a.strip()}`, not `{b.strip()}`" for k, (a, b) in both if a != b]


def main() -> None:
    """Write the pages, or say where they differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page differs")
    parser.add_argument("--all", action="store_true", help="run the slow commands, too")
    parser.add_argument("--only", metavar="WORDS", help="run only commands with these words in them")
    options = parser.parse_args()
    try:
        pages = read()
        texts, left = fill(pages, options.all or options.only is not None, options.only or "")
    except DocsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    changed = [line for page in pages for line in differences(page, texts[page.name])]
    print(*(f"left as it is: {command}" for command in left), *changed, sep="\n")
    if not options.check:
        # Others may have been edited meanwhile.
        for page in pages:
            if differences(page, texts[page.name]):
                (ROOT / page.name).write_text(texts[page.name])
    sys.exit(1 if changed and options.check else 0)


if __name__ == "__main__":
    main()
