"""A placement drawn as a picture shows every GPU, stage and route; names from files remain plain text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import hexgen2, refused

from hexgen2.placement import Placement
from hexgen2.report.picture import html, svg
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

SVG = "{http://www.w3.org/2000/svg}"
CHIP = {"width": "9", "height": "11"}


def placed(strategy: str) -> Placement:
    return find_strategy(strategy)(
        make_problem("hexgen2-case-study", "opt-30b", "LPHD"), SearchOptions(seed=0)
    )


@pytest.mark.parametrize("strategy", ["hexgen2", "vllm"])
def test_it_has_every_gpu_every_replica_and_every_route(strategy: str) -> None:
    placement = placed(strategy)
    root = ElementTree.fromstring(svg(placement))
    squares = [each for each in root.iter(f"{SVG}rect") if CHIP.items() <= each.attrib.items()]
    gpus = [gpu for replica in placement.replicas for gpu in replica.gpus]
    types = {node.accelerators for node in placement.cluster.nodes}
    assert len(squares) == len(gpus) + len(types)  # the legend adds one per type
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert all(replica.id in texts for replica in placement.replicas)
    assert len(list(root.iter(f"{SVG}path"))) == len(placement.routes)


def test_boxes_do_not_overlap_and_stay_inside() -> None:
    root = ElementTree.fromstring(svg(placed("vllm")))
    boxes = [
        tuple(float(each.attrib[key]) for key in ("x", "y", "width", "height"))
        for each in root.iter(f"{SVG}rect")
        if "stroke" in each.attrib
    ]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for k, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
        for x2, y2, w2, h2 in boxes[:k]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_names_are_text_and_nothing_else() -> None:
    placement = placed("hexgen2")
    hostile = "<script>alert(1)</script>&\x1b[2J"
    placement.cluster.name = hostile
    root = ElementTree.fromstring(svg(placement))
    assert any("<script>" in (each.text or "") for each in root.iter(f"{SVG}text"))
    assert "\x1b" not in svg(placement)
    seen: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: seen.append(tag)  # type: ignore[method-assign]
    parser.feed(html(placement))
    assert "script" not in seen and {"svg", "pre", "title"} <= set(seen)


def test_the_command_writes_both(tmp_path: Path) -> None:
    file, drawn, page = tmp_path / "placement.json", tmp_path / "p.svg", tmp_path / "p.html"
    placement = placed("hexgen2")
    placement.save(file)
    done = hexgen2("show", str(file), "--svg", str(drawn), "--html", str(page))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert drawn.read_text() == svg(placement) and svg(placement) in page.read_text()


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    placed("vllm").save(file)
    done = hexgen2("show", file, "--svg", tmp_path / "none" / "p.svg")
    assert "none" in refused(done)
