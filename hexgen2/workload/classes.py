"""The shipped workloads, and how a user names one: a class, a mixture of them, fixed lengths or a trace
file."""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cost_model.errors import InputError
from hexgen2.workload.lengths import MAX_TOKENS, RequestClass, Workload
from hexgen2.workload.requests import Requests
from hexgen2.workload.traces import read_trace

HEAVY_PREFILL_TOKENS = 512  # HexGen-2, section 5.1: a longer prompt is a heavy prefill
HEAVY_DECODE_TOKENS = 128  # HexGen-2, section 5.1: a longer answer is a heavy decode

PARTS = 3
"""Parts of a trace's prompts in each class, and of the answers to each of these."""

_SOURCE = (
    "means of the Azure LLM inference trace 2023 (conversation), {} "
    "of the 16663 requests with input <= 2048 and output <= 1024 tokens"
)
MAX_SHARE = 1e6
_CLASSES = [
    RequestClass(name="HPLD", isl=1273.9, osl=80.2, weight=1766),
    RequestClass(name="HPHD", isl=1104.2, osl=397.6, weight=7254),
    RequestClass(name="LPHD", isl=228.6, osl=177.8, weight=2110),
    RequestClass(name="LPLD", isl=355.9, osl=85.2, weight=5533),
]

SHIPPED: dict[str, Workload] = {
    c.name: Workload(
        name=c.name,
        classes=(c.model_copy(update={"weight": 1.0}),),
        source=_SOURCE.format(f"{c.weight:.0f}"),
    )
    for c in _CLASSES
}
SHIPPED["online"] = Workload(name="online", classes=tuple(_CLASSES), source=_SOURCE.format("all"))


def list_workloads() -> list[tuple[str, str]]:
    """Name and source of every shipped workload."""
    return [(name, workload.source) for name, workload in SHIPPED.items()]


def load_workload(
    workload: str | Path | Workload | None = None, isl: float | None = None, osl: float | None = None
) -> Workload:
    """A shipped workload, a mixture of shipped ones, a workload of fixed lengths, or that of a trace file.

    Parameters
    ----------
    workload : shipped name in any case, several names with their shares ("HPLD:2,LPHD:1"), trace file (see
        `hexgen2.workload.traces.read_trace`), or a workload; optional if isl and osl are given
    isl, osl : prompt and output tokens, which override those of every class

    Raises
    ------
    InputError : unknown name, invalid share, unusable trace, or lengths out of range
    """
    for option, value, least in (("--isl", isl, 1), ("--osl", osl, 1)):
        if value is not None and not least <= value <= MAX_TOKENS:
            remedy = f"give a number of tokens, at least {least} and at most {MAX_TOKENS}"
            raise InputError(option, "", f"is {value:g}", remedy)
    if workload is None:
        if isl is None or osl is None:
            missing = "--isl" if isl is None else "--osl"
            raise InputError("--workload", "", "is missing", f"name one, or give {missing} as well")
        fixed = RequestClass(name="fixed", isl=isl, osl=osl)
        return Workload(name=f"{isl:g}-{osl:g}", classes=(fixed,), source="--isl and --osl")
    if not isinstance(workload, Workload):
        workload = _named(str(workload))
    if isl is None and osl is None:
        return workload
    lengths = {key: float(value) for key, value in (("isl", isl), ("osl", osl)) if value is not None}
    if len(lengths) == 2:
        classes: tuple[RequestClass, ...] = (RequestClass(name=workload.name, **lengths),)
    else:
        classes = tuple(c.model_copy(update=lengths) for c in workload.classes)
    given = " and ".join(f"{key} {value:g}" for key, value in lengths.items())
    return workload.model_copy(update={"classes": classes, "source": f"{workload.source}; {given} as given"})


def _named(name_or_file: str) -> Workload:
    shipped = _shipped(name_or_file)
    if shipped is not None:
        return shipped
    path = Path(name_or_file)
    if not name_or_file or ("/" not in name_or_file and not _exists(path)):
        if "," in name_or_file or ":" in name_or_file:
            return _mixture(name_or_file)
        if not path.suffix:
            problem = "is neither a shipped workload nor a trace file"
            raise InputError(name_or_file[:200] or "''", "", problem, _nearest(name_or_file))
    return workload_of_trace(read_trace(path), path.stem)


def _shipped(name: str) -> Workload | None:
    return {known.lower(): workload for known, workload in SHIPPED.items()}.get(name.strip().lower())


def _nearest(name: str) -> str:
    lower = {known.lower(): known for known in SHIPPED}
    near = difflib.get_close_matches(name.strip().lower()[:100], lower, n=1, cutoff=0.5)
    return f"did you mean {lower[near[0]]}?" if near else f"shipped: {', '.join(SHIPPED)}"


def _mixture(text: str) -> Workload:
    """Parse shipped workloads with shares, as in "HPLD:2,LPHD:1"; a missing share is 1."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, colon, share = (word.strip() for word in part.partition(":"))
        workload = _shipped(name)
        if workload is None:
            problem = f"{name[:100]!r} is not a shipped workload"
            raise InputError("--workload", text[:200], problem, _nearest(name))
        if workload.name in shares:
            raise InputError(
                "--workload",
                text[:200],
                f"names {workload.name} twice",
                "name it once, with the sum of the shares",
            )
        shares[workload.name] = _share(share, text) if colon else 1.0
    classes = [
        c.model_copy(
            update={"weight": share * c.weight / math.fsum(one.weight for one in SHIPPED[name].classes)}
        )
        for name, share in shares.items()
        for c in SHIPPED[name].classes
    ]
    name = ",".join(f"{name}:{share:g}" for name, share in shares.items())
    return Workload(name=name, classes=tuple(classes), source=_SOURCE.format("some") + ", shares as given")


def _share(text: str, mixture: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 1 / MAX_SHARE <= share <= MAX_SHARE:
        remedy = f"give a number from {1 / MAX_SHARE:g} to {MAX_SHARE:g}, as in HPLD:2,LPHD:1"
        raise InputError("--workload", mixture[:200], f"{text[:40]!r} is not a valid share", remedy)
    return share


def workload_of_trace(trace: Requests, name: str) -> Workload:
    """The requests of a trace, divided into the four classes of HexGen-2 by the length of prompt and answer,
    and each of these into PARTS x PARTS cells of about as many requests: a promise for requests that all have
    the mean lengths of their class would not hold for the trace."""
    heavy_prefill, heavy_decode = trace.isl > HEAVY_PREFILL_TOKENS, trace.osl > HEAVY_DECODE_TOKENS
    classes = []
    for label, members in (
        ("HPLD", heavy_prefill & ~heavy_decode),
        ("HPHD", heavy_prefill & heavy_decode),
        ("LPHD", ~heavy_prefill & heavy_decode),
        ("LPLD", ~heavy_prefill & ~heavy_decode),
    ):
        cells = defaultdict[tuple[float, float], int](int)
        for cell in _cells(trace, np.flatnonzero(members)):
            cells[float(trace.isl[cell].mean()), float(trace.osl[cell].mean())] += len(cell)
        for k, ((isl, osl), count) in enumerate(cells.items(), 1):
            cell_name = label if len(cells) == 1 else f"{label}-{k}"
            classes.append(RequestClass(name=cell_name, isl=isl, osl=osl, weight=float(count)))
    return Workload(name=name, classes=tuple(classes), source=trace.source)


def _cells(trace: Requests, members: np.ndarray) -> Iterator[np.ndarray]:
    """These requests in cells of like lengths: by prompts first, then by answers."""
    by_isl = members[np.argsort(trace.isl[members], kind="stable")]
    for column in np.array_split(by_isl, PARTS):
        by_osl = column[np.argsort(trace.osl[column], kind="stable")]
        yield from (cell for cell in np.array_split(by_osl, PARTS) if len(cell))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
