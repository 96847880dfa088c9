"""A placement as a picture: replicas as boxes of stages and GPUs, KV routes as arrows between them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import StringIO
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from cost_model.printable import printable
from hexgen2.placement import Placement, Replica, Route
from hexgen2.report.placement import PIPED_WIDTH, PlainConsole, compact, print_placement

WIDTH, MARGIN, BOX_WIDTH = 960, 24, 340
TOP, ROW, TITLE, GAP = 64, 20, 30, 22
"""Pixels: where the boxes begin, a stage's line, a box's title, between two boxes."""
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Okabe and Ito's, which readers with any colour vision can tell apart."""
DARK, GREY = "#222222", "#555555"
CHIPS = 8
"""GPUs of a stage that are drawn one by one; more are only a number."""
WIDEST, THINNEST = 14.0, 1.5
"""Pixels of the arrow with the largest flow, and the least of any arrow."""
NEGLIGIBLE = 1e-3
"""Share of the largest flow below which a route is not drawn."""

Box = tuple[float, float, float]  # left, top, height
Types = dict[str, tuple[str, str]]  # node: GPU type, colour


def svg(placement: Placement) -> str:
    """The placement as an SVG document.

    Prefill (and mixed) replicas stand on the left, decode replicas on the right, colocated ones in both
    columns. Each stage is a line with a square for each of its GPUs, coloured by type. A route is as thick as
    its flow.
    """
    types = _types(placement)
    left, right = _columns(placement.replicas)
    boxes: dict[str, Box] = {}
    for x, column in ((MARGIN, left), (WIDTH - MARGIN - BOX_WIDTH, right)):
        y = float(TOP)
        for replica in column:
            boxes[replica.id] = (x, y, TITLE + ROW * len(replica.stages) + 8)
            y += boxes[replica.id][2] + GAP
    bottom = max((y + height for _, y, height in boxes.values()), default=TOP)
    size = {"width": str(WIDTH), "height": f"{bottom + 56:g}"}
    root = Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {bottom + 56:g}", **size},
        **{"font-family": "system-ui, sans-serif"},
    )
    _rectangle(root, 0, 0, WIDTH, bottom + 56, "#ffffff")
    _heading(root, placement)
    _arrows(root, [route for route in placement.routes if route.from_ != route.to], boxes)
    for replica in placement.replicas:
        _replica(root, replica, boxes[replica.id], types)
    _legend(root, types, bottom + 34)
    indent(root, "")
    return tostring(root, encoding="unicode") + "\n"


def _types(placement: Placement) -> Types:
    """The type and colour of the GPUs of each node in use."""
    names = {node.name: node.accelerators.split(":")[0] for node in placement.cluster.nodes}
    used = {gpu.rsplit("/", 1)[0] for replica in placement.replicas for gpu in replica.gpus}
    order = list(dict.fromkeys(name for node, name in names.items() if node in used))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(order)}
    return {node: (name, colours[name]) for node, name in names.items() if node in used}


def _columns(replicas: Sequence[Replica]) -> tuple[list[Replica], list[Replica]]:
    left = [replica for replica in replicas if replica.role in ("prefill", "mixed")]
    right = [replica for replica in replicas if replica.role == "decode"]
    for replica in replicas:
        if replica not in left and replica not in right:
            min(left, right, key=len).append(replica)
    return left, right


def _heading(root: Element, placement: Placement) -> None:
    first = f"{placement.model.name} on {placement.cluster.name}, {placement.workload.name}"
    throughput = placement.throughput
    second = (
        f"{throughput.req_s:.4g} requests/s, {throughput.output_tok_s:.5g} output tokens/s (predicted), "
        f"${placement.price_per_hour:.2f} per hour"
    )
    _text(root, MARGIN, 26, first, size=15, bold=True)
    _text(root, MARGIN, 46, second, GREY)


def _replica(root: Element, replica: Replica, box: Box, types: Types) -> None:
    """A box with a title, and a line for each stage."""
    x, y, height = box
    served = f"{replica.utilisation:.0%} used"
    if replica.role != "mixed":  # whose work is prompts and answers, not whole requests
        served = f"{replica.capacity_req_s * replica.utilisation:.3g} requests/s, {served}"
    _rectangle(root, x, y, BOX_WIDTH, height, "#f7f7f7", rx="6", stroke="#888888")
    _text(root, x + 10, y + 19, replica.id, bold=True)
    _text(root, x + BOX_WIDTH - 10, y + 19, served, GREY, anchor="end")
    for number, stage in enumerate(replica.stages):
        line = y + TITLE + ROW * number
        name, colour = types[stage.gpus[0].rsplit("/", 1)[0]]
        chips = min(len(stage.gpus), CHIPS)
        for chip in range(chips):
            _rectangle(root, x + 10 + 11 * chip, line + 2, 9, 11, colour, rx="2")
        what = f"{len(stage.gpus)}x{name}  {compact(stage.gpus)}"
        _text(root, x + 14 + 11 * chips, line + 12, what if len(what) < 36 else what[:34] + "…", size=11)
        layers = f"layers {stage.layers[0]}-{stage.layers[1] - 1}"
        _text(root, x + BOX_WIDTH - 10, line + 12, layers, GREY, size=11, anchor="end")


def _arrows(root: Element, routes: Sequence[Route], boxes: dict[str, Box]) -> None:
    """A curve for each route; those that leave or reach the same box share its side in order."""
    most = max((route.flow_req_s for route in routes), default=0.0)
    flowing = [route for route in routes if route.flow_req_s > NEGLIGIBLE * most]
    for route in flowing:
        leaving = [other for other in flowing if other.from_ == route.from_]
        reaching = [other for other in flowing if other.to == route.to]
        x1, y1 = boxes[route.from_][0] + BOX_WIDTH, _share_of_side(boxes[route.from_], leaving, route)
        x2, y2 = boxes[route.to][0], _share_of_side(boxes[route.to], reaching, route)
        middle = (x1 + x2) / 2
        path = f"M {x1:g} {y1:g} C {middle:g} {y1:g}, {middle:g} {y2:g}, {x2:g} {y2:g}"
        width = max(THINNEST, WIDEST * route.flow_req_s / most)
        look = {"fill": "none", "stroke": "#4477aa", "stroke-opacity": "0.45", "stroke-width": f"{width:.2f}"}
        SubElement(root, "path", {"d": path, **look})
        label = f"{route.flow_req_s:.3g}/s"
        _text(root, x1 + 8, y1 - 2 - width / 2, label, size=11)


def _share_of_side(box: Box, sharing: Sequence[Route], route: Route) -> float:
    """Where on a box's side a route starts or ends: the middle of its share."""
    _, y, height = box
    return y + height * (sharing.index(route) + 0.5) / len(sharing)


def _legend(root: Element, types: Types, y: float) -> None:
    x = float(MARGIN)
    for name, colour in dict.fromkeys(types.values()):
        _rectangle(root, x, y - 10, 9, 11, colour, rx="2")
        _text(root, x + 14, y, name, size=11)
        x += 34 + 7 * len(name)
    note = "squares are GPUs, arrows are KV cache routes with their requests/s"
    _text(root, WIDTH - MARGIN, y, note, GREY, size=11, anchor="end")


def _rectangle(
    root: Element, x: float, y: float, width: float, height: float, fill: str, **more: str
) -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
    SubElement(root, "rect", {**place, "fill": fill, **more})


def _text(
    root: Element,
    x: float,
    y: float,
    text: str,
    fill: str = DARK,
    *,
    size: int = 12,
    bold: bool = False,
    anchor: str = "start",
) -> None:
    look = {"fill": fill, "font-size": str(size), "text-anchor": anchor} | (
        {"font-weight": "bold"} if bold else {}
    )
    SubElement(root, "text", {"x": f"{x:g}", "y": f"{y:g}", **look}).text = printable(text)


def html(placement: Placement) -> str:
    """A page of its own, without scripts: the picture, and the tables that `hexgen2 show` prints."""
    console = PlainConsole(record=True, file=StringIO(), soft_wrap=True, width=PIPED_WIDTH)
    print_placement(placement, console)
    title = escape(printable(f"{placement.model.name} on {placement.cluster.name}"))
    head = f'<head><meta charset="utf-8"><title>{title}</title></head>'
    body = f"<body>\n{svg(placement)}<pre>{escape(console.export_text())}</pre>\n</body>"
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n{body}\n</html>\n'
