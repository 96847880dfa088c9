"""Files, links and commands in the documentation exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.docs_figures import differences, fill, read

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
PACKAGES = ("benchmarks", "cluster_specs", "cost_model", "examples", "hexgen2", "runtime", "tests")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub generates them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name) if name else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w./-]*)`", text):
        assert (ROOT / path).exists(), f"{page.name}: {path}"
    for module in re.findall(r"-m (benchmarks[\w.]+\w)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), f"{page.name}: {module}"


def test_short_file_names_exist_somewhere() -> None:
    names = {path.name for package in PACKAGES for path in (ROOT / package).rglob("*.*")}
    for name in re.findall(r"`(\w+\.(?:py|json|yaml|cpp))`", (ROOT / "docs" / "structure.md").read_text()):
        assert name in names, name


def test_pages_show_what_their_commands_print() -> None:
    pages = read()
    texts, left = fill(pages, slow_too=False)
    assert len({part.command for page in pages for part in page.parts} - set(left)) > 4
    differ = [line for page in pages for line in differences(page, texts[page.name])]
    assert differ == [], "run `make docs-figures`"


def test_the_python_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) > 3
    exec("\n".join(blocks), {})
