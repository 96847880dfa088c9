"""Cases: nodes with measured tables of tokens/s, and links, from a JSON file (the form of Helix's artifact).

A file has a list `cases`, or is one case: `layers`, `token_bytes`, `activation_bytes`, `types` (of each
node, in the order of the nodes), `gpu` (by type: `T_tokens_per_s` by layers held, `nic_Bps`, and if known
`vram_bytes`, `max_layers` and `kv_blocks16`) and `links`. Results that are stored with a case are not read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cost_model.errors import InputError
from cost_model.fields import Name, between, schema_error
from cost_model.files import read_text

MAX_BYTES = 64 << 20
MAX_NODES, MAX_LAYERS = 1000, 2000
_Figure = Annotated[float, Field(gt=0, allow_inf_nan=False), between(1e-9, 1e18)]
_OrZero = Annotated[float, Field(ge=0, allow_inf_nan=False), between(1e-9, 1e18, or_zero=True)]
_Type = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=60)]
MB = 1e6


class _Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class NodeType(_Loose):
    """A type of node: tokens/s by layers held, from one layer on, and bytes/s of its network card."""

    T_tokens_per_s: list[_OrZero] = Field(min_length=1, max_length=MAX_LAYERS)
    nic_Bps: _Figure
    vram_bytes: _Figure = 16e9
    max_layers: Annotated[int, Field(ge=0)] | None = None
    kv_blocks16: list[_OrZero] | None = None

    @property
    def table(self) -> list[float]:
        """Tokens/s by layers held, as far as they fit."""
        return self.T_tokens_per_s[: self.max_layers]


class CaseLinks(_Loose):
    """Links: all alike (`bandwidth_Bps`, `latency_s`), or in MB/s and ms: from the coordinator, to it, and
    above the diagonal between nodes, both ways alike."""

    uniform: bool
    bandwidth_Bps: _Figure | None = None
    latency_s: _OrZero = 0.001
    source_MBps: list[_Figure] | None = None
    sink_MBps: list[_Figure] | None = None
    upper_MBps: list[list[_Figure]] | None = None
    upper_ms: list[list[_OrZero]] | None = None


class Case(_Loose):
    """A case of the file."""

    name: Name
    model: Name = "model"
    layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)]
    token_bytes: _Figure
    activation_bytes: _Figure
    layer_param_bytes: _Figure = 1e9
    types: list[_Type] = Field(min_length=1, max_length=MAX_NODES)
    gpu: dict[_Type, NodeType]
    links: CaseLinks

    @property
    def nodes(self) -> int:
        """n."""
        return len(self.types)

    def bandwidths(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes/s [n, n] between nodes, [n] from the coordinator and [n] to it."""
        links, n = self.links, self.nodes
        if links.uniform:
            return (*(np.full(shape, float(links.bandwidth_Bps or 0)) for shape in ((n, n), n, n)),)  # type: ignore[return-value]
        ends = [np.array(given) * MB for given in (links.source_MBps, links.sink_MBps)]
        return _square(links.upper_MBps or [], n) * MB, ends[0], ends[1]

    def latencies_s(self) -> np.ndarray:
        """Seconds [n, n] between nodes."""
        if self.links.uniform or self.links.upper_ms is None:
            return np.full((self.nodes, self.nodes), self.links.latency_s)
        return _square(self.links.upper_ms, self.nodes) * 1e-3


def _square(upper: list[list[float]], n: int) -> np.ndarray:
    """The symmetric matrix [n, n] of which these are the rows above the diagonal."""
    matrix = np.zeros((n, n))
    for a, row in enumerate(upper):
        matrix[a, a + 1 :] = row
    return matrix + matrix.T


@dataclass(frozen=True)
class NamedCase:
    """A case, and where it is from."""

    case: Case
    source: str


def load_case(asked: str) -> NamedCase:
    """The case that FILE#NAME, or FILE with one case, stands for.

    Raises
    ------
    InputError : no such file or case, or a wrong one
    """
    name_or_path, _, name = str(asked).rpartition("#") if "#" in str(asked) else (str(asked), "", "")
    path, remedy = Path(name_or_path), "see docs/strategies.md for the form of a case"
    source = str(path)
    text = read_text(path, MAX_BYTES)
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(source, "", f"is not JSON: {str(error)[:100]}", remedy) from None
    listed = data.get("cases", [data]) if isinstance(data, dict) else data
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise InputError(source, "cases", "is not a list of cases", remedy)
    names = [str(each.get("name", "")) for each in listed]
    if not name and len(listed) != 1:
        raise InputError(
            source, "cases", f"are {len(listed)}", f"name one, as in {source}#{names[0] if names else 'NAME'}"
        )
    if name and name not in names:
        raise InputError(source, "cases", f"have no '{name[:60]}'", f"use one of {', '.join(names)[:300]}")
    index = names.index(name) if name else 0
    key = f"cases[{index}]" if "cases" in data else ""
    try:
        case = Case.model_validate(listed[index])
    except ValidationError as error:
        wrong = schema_error(error, source, remedy)
        raise InputError(source, ".".join(filter(None, (key, wrong.key))), wrong.problem, remedy) from None
    for inner, problem in _contradictions(case):
        raise InputError(source, ".".join(filter(None, (key, inner))), problem, remedy)
    return NamedCase(case, f"{source}#{case.name}")


def _contradictions(case: Case):
    """(key, problem) of what the schema does not say."""
    n, links = case.nodes, case.links
    for v, type_ in enumerate(case.types):
        if type_ not in case.gpu:
            yield f"types[{v}]", f"'{type_}' is not in gpu"
    for type_, node in case.gpu.items():
        if node.max_layers is not None and node.max_layers > len(node.T_tokens_per_s):
            yield (
                f"gpu.{type_}.max_layers",
                f"is {node.max_layers}, of {len(node.T_tokens_per_s)} T_tokens_per_s",
            )
    if links.uniform:
        if links.bandwidth_Bps is None:
            yield "links.bandwidth_Bps", "is missing"
        return
    for key in ("source_MBps", "sink_MBps"):
        given = getattr(links, key)
        if given is None or len(given) != n:
            yield f"links.{key}", f"should have one figure for each of the {n} nodes"
    for key in ("upper_MBps", "upper_ms"):
        given = getattr(links, key)
        if given is None and key == "upper_ms":
            continue
        if [len(row) for row in given or []] not in ([*range(n - 1, 0, -1)], [*range(n - 1, -1, -1)]):
            yield (
                f"links.{key}",
                f"should have a row of the later nodes for each of the {n} nodes but the last",
            )


def plain_type(name: str) -> tuple[str, int]:
    """The card and the number of them in a node's type: ("L4", 2) of "L4x2"."""
    found = re.fullmatch(r"(.+?)x(\d{1,2})", name)
    return (found[1], int(found[2])) if found else (name, 1)
