"""Which workload a user means: a shipped class, fixed lengths, or a trace file."""

from __future__ import annotations

import difflib
from pathlib import Path

from cost_model.errors import InputError
from hexgen2.trace import Trace, read_trace
from hexgen2.workload import RequestClass, Workload

HEAVY_PREFILL_TOKENS = 512  # HexGen-2, section 5.1: longer prompts are heavy
HEAVY_DECODE_TOKENS = 128  # HexGen-2, section 5.1: longer answers are heavy

_SOURCE = (
    "means of the Azure LLM inference trace 2023 (conversation), {} "
    "of the 16663 requests with input <= 2048 and output <= 1024 tokens"
)
MAX_TOKENS = 10_000_000  # of a prompt or an answer: no model has such a context
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
    name_or_file: str | None = None, isl: float | None = None, osl: float | None = None
) -> Workload:
    """A shipped workload by name, one of fixed lengths, or that of a trace file.

    Parameters
    ----------
    name_or_file : shipped name in any case, or a trace (see `hexgen2.trace.read_trace`); may be left out
        where isl and osl are given
    isl, osl : prompt and output tokens; each overrides that of every class

    Raises
    ------
    InputError : unknown name, unusable trace, or lengths that are not positive (osl at least 1)
    """
    for option, value, least in (("--isl", isl, 1), ("--osl", osl, 1)):
        if value is not None and not least <= value <= MAX_TOKENS:
            remedy = f"give a number of tokens, at least {least} and at most {MAX_TOKENS}"
            raise InputError(option, "", f"is {value:g}", remedy)
    if name_or_file is None:
        if isl is None or osl is None:
            missing = "--isl" if isl is None else "--osl"
            raise InputError("--workload", "", "is missing", f"name one, or give {missing} as well")
        fixed = RequestClass(name="fixed", isl=isl, osl=osl)
        return Workload(name=f"{isl:g}-{osl:g}", classes=(fixed,), source="--isl and --osl")
    workload = _named(name_or_file)
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
    by_lower_case = {name.lower(): workload for name, workload in SHIPPED.items()}
    shipped = by_lower_case.get(name_or_file.strip().lower())
    if shipped is not None:
        return shipped
    path = Path(name_or_file)
    if not name_or_file or not ("/" in name_or_file or path.suffix or _exists(path)):
        near = difflib.get_close_matches(name_or_file.lower()[:100], by_lower_case, n=1, cutoff=0.5)
        hint = f"did you mean {by_lower_case[near[0]].name}?" if near else f"shipped: {', '.join(SHIPPED)}"
        raise InputError(
            name_or_file[:200] or "''", "", "is neither a shipped workload nor a trace file", hint
        )
    return workload_of_trace(read_trace(path), path.stem)


def workload_of_trace(trace: Trace, name: str) -> Workload:
    """Up to the four classes of HexGen-2 with their shares of the requests and their mean lengths."""
    heavy_prefill, heavy_decode = trace.isl > HEAVY_PREFILL_TOKENS, trace.osl > HEAVY_DECODE_TOKENS
    classes = []
    for label, members in (
        ("HPLD", heavy_prefill & ~heavy_decode),
        ("HPHD", heavy_prefill & heavy_decode),
        ("LPHD", ~heavy_prefill & heavy_decode),
        ("LPLD", ~heavy_prefill & ~heavy_decode),
    ):
        if members.any():
            isl, osl = float(trace.isl[members].mean()), float(trace.osl[members].mean())
            classes.append(RequestClass(name=label, isl=isl, osl=osl, weight=float(members.sum())))
    return Workload(name=name, classes=tuple(classes), source=trace.source)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
