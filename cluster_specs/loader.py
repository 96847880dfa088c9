"""Loading cluster specs: from a shipped name or a YAML file to a spec in which every figure is resolved."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster_specs.catalogue import catalogue
from cluster_specs.schema import LARGEST, SMALLEST, AcceleratorSpec, ClusterSpec, NodeSpec
from cluster_specs.strict_yaml import MAX_YAML_BYTES, parse_mapping
from cluster_specs.validation import input_error
from cost_model.errors import InputError
from cost_model.files import read_text
from cost_model.hardware import CATALOGUE, GIB, Accelerator, find_accelerator, of_generation

MAX_GPUS = 4096
_MAX_MATRIX_BYTES = 256 << 20
_FOLDER = Path(__file__).parent
_NOT_A_CLUSTER = {"prices"}
CARD_ASSUMPTION = (
    "each node's network card carries as much as its fastest link, in each direction, "
    "where network_gbit_s does not say otherwise"
)


def _shipped() -> dict[str, Path]:
    """The files of the shipped clusters, by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.yaml")) if path.stem not in _NOT_A_CLUSTER}


def list_clusters() -> list[tuple[str, str]]:
    """Name and description of every shipped cluster, by name."""
    return [(name, load_cluster(name).description) for name in _shipped()]


def load_cluster(cluster: str | Path | ClusterSpec) -> ClusterSpec:
    """The cluster of that shipped name, or the one that a YAML file describes; resolved (see `resolve`).

    A spec is taken as it is, and resolved.

    Raises
    ------
    InputError : with the file, a key such as `nodes[2].accelerators`, the problem and the remedy
    """
    if isinstance(cluster, ClusterSpec):
        return resolve(cluster, cluster.name, Path())
    shipped, name_or_file = _shipped(), str(cluster)
    path = shipped.get(name_or_file.strip().lower())
    if path is None:
        path = Path(name_or_file)
        looks_like_a_path = "/" in name_or_file or path.suffix.lower() in {".yaml", ".yml", ".json"}
        if not name_or_file or not (looks_like_a_path or _exists(path)):
            near = difflib.get_close_matches(name_or_file.lower()[:100], shipped, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"shipped: {', '.join(shipped)}"
            raise InputError(name_or_file[:200] or "''", "", "is neither a shipped cluster nor a file", hint)
    source = str(path)
    return parse_cluster(parse_mapping(read_text(path, MAX_YAML_BYTES), source), source, path.parent)


def parse_cluster(data: dict[str, Any], source: str, folder: Path) -> ClusterSpec:
    """Validate plain data as a cluster spec and resolve it; relative files are looked up in `folder`."""
    try:
        spec = ClusterSpec.model_validate(data, strict=True)
    except ValidationError as error:
        raise input_error(error, data, source, ClusterSpec) from None
    return resolve(spec, source, folder)


def resolve(spec: ClusterSpec, source: str, folder: Path) -> ClusterSpec:
    """The same cluster with every reference resolved; resolving twice changes nothing.

    Cards have canonical names, with their figures in `accelerators`; every node has a price; `measured` is
    the matrix itself. Assumed prices and network cards are added to `assumptions`."""
    if not spec.nodes and not spec.offers:
        raise InputError(source, "nodes", "is empty", "list at least one, or offers")
    cards = {name: _accelerator(name, entry) for name, entry in spec.accelerators.items()}
    entries = dict(spec.accelerators)
    assumptions = list(spec.assumptions)

    def canonical(text: str, key: str) -> tuple[str, int]:
        """Canonical name and count; a card of the catalogue is added to the entries."""
        name, count = parse_accelerators(text, source, key)
        card = find_accelerator(name, cards, source=source, key=key)
        if card.name not in entries:
            entries[card.name] = _entry(card)
        return card.name, count

    nodes, total = [], 0
    for index, node in enumerate(spec.nodes):
        card_name, count = canonical(node.accelerators, f"nodes[{index}].accelerators")
        total += count
        if total > MAX_GPUS:
            problem = f"more than {MAX_GPUS} devices in all"
            raise InputError(source, f"nodes[{index}].accelerators", problem, "describe a smaller cluster")
        price = node.price_per_gpu_hour
        if price is None:
            price = _price(card_name, entries[card_name], assumptions)
        update = {"accelerators": f"{card_name}:{count}", "price_per_gpu_hour": price}
        nodes.append(node.model_copy(update=update))
    offers = []
    for index, offer in enumerate(spec.offers):
        card_name, _ = canonical(offer.accelerators, f"offers[{index}].accelerators")
        offers.append(offer.model_copy(update={"accelerators": card_name}))

    _check_names(spec.nodes, source)
    _check_links(spec, source)
    _check_uplinks(spec, source)
    cards_assumed = len(nodes) > 1 and any(node.network_gbit_s is None for node in nodes)
    if cards_assumed and CARD_ASSUMPTION not in assumptions:
        assumptions.append(CARD_ASSUMPTION)
    network = spec.network
    if network.measured is not None:
        network = network.model_copy(update={"measured": _measured(network.measured, total, source, folder)})
    return spec.model_copy(
        update={
            "nodes": nodes,
            "offers": offers,
            "network": network,
            "accelerators": entries,
            "assumptions": assumptions,
        }
    )


def parse_accelerators(text: str, source: str, key: str) -> tuple[str, int]:
    """NAME:COUNT, SkyPilot's spelling, as (name, count); a bare NAME is one device."""
    match = re.fullmatch(r"\s*([^:]*[^:\s])\s*(?::\s*(-?\d{1,9})\s*)?", text)
    if match is None:
        raise InputError(source, key, f"{text[:60]!r} is not NAME:COUNT", "write for example H100:2")
    count = int(match[2] or 1)
    if count < 1:
        raise InputError(source, key, f"the count is {count}", "give at least 1, for example H100:1")
    return match[1], count


def accelerator_of(spec: ClusterSpec, name: str) -> Accelerator:
    """The card of a resolved spec by its canonical name."""
    return _accelerator(name, spec.accelerators[name])


def _accelerator(name: str, entry: AcceleratorSpec) -> Accelerator:
    """The card that an entry describes; one of the catalogue's name has its generation and speedups."""
    known = CATALOGUE.get(name)
    if known is None or (entry.generation and entry.generation != known.generation):
        known = of_generation("cpu" if entry.kind == "cpu" else entry.generation)
    return replace(
        known,
        name=name,
        memory_bytes=entry.memory_gib * GIB,
        flops_s=entry.bf16_dense_tflops * 1e12,
        memory_bandwidth_bytes_s=entry.memory_bandwidth_gbyte_s * 1e9,
        kind=entry.kind,
    )


def _entry(card: Accelerator) -> AcceleratorSpec:
    """The entry of a card of the catalogue."""
    return AcceleratorSpec(
        memory_gib=card.memory_bytes / GIB,
        bf16_dense_tflops=card.flops_s / 1e12,
        memory_bandwidth_gbyte_s=card.memory_bandwidth_bytes_s / 1e9,
        kind=card.kind,
        price_per_gpu_hour=catalogue()[card.name].price_per_gpu_hour,
    )


def _price(name: str, entry: AcceleratorSpec, assumptions: list[str]) -> float:
    """The card's price in $/h; added to the assumptions if it is assumed."""
    known = catalogue().get(name)
    if entry.price_per_gpu_hour is None:
        listed = known.price_per_gpu_hour if known else None
        price = listed or 0.0
        note = f"price of {name}: {price:g} $/h, "
        note += "none was given" if listed is None else "from the catalogue"
    else:
        price = entry.price_per_gpu_hour
        if known is None or not known.price_assumed or price != known.price_per_gpu_hour:
            return price
        note = f"price of {name}: {price:g} $/h, {known.price_source}"
    if note not in assumptions:
        assumptions.append(note)
    return price


def _check_names(nodes: list[NodeSpec], source: str) -> None:
    """Refuse node names that are used twice."""
    seen: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.name in seen:
            problem = f"{node.name!r} is also the name of nodes[{seen[node.name]}]"
            raise InputError(source, f"nodes[{index}].name", problem, "give every node its own name")
        seen[node.name] = index


def _check_links(spec: ClusterSpec, source: str) -> None:
    """Refuse links to unknown nodes, of a node to itself, and repeated ones."""
    names = [node.name for node in spec.nodes]
    seen: dict[frozenset[str], int] = {}
    for index, link in enumerate(spec.network.links):
        key = f"network.links[{index}]"
        for end, name in (("from", link.from_), ("to", link.to)):
            _check_known(name, names, source, f"{key}.{end}")
        if link.from_ == link.to:
            problem = f"links {link.from_!r} to itself"
            raise InputError(source, key, problem, "set the node's interconnect instead")
        pair = frozenset((link.from_, link.to))
        if pair in seen:
            problem = f"repeats network.links[{seen[pair]}] (a link holds in both directions)"
            raise InputError(source, key, problem, "keep one of them")
        seen[pair] = index


def _check_uplinks(spec: ClusterSpec, source: str) -> None:
    """Refuse uplinks with equal names, unknown nodes or repeated ones."""
    names = [node.name for node in spec.nodes]
    seen: dict[str, int] = {}
    for index, uplink in enumerate(spec.network.uplinks):
        key = f"network.uplinks[{index}]"
        if uplink.name in seen:
            problem = f"{uplink.name[:60]!r} is also the name of network.uplinks[{seen[uplink.name]}]"
            raise InputError(source, f"{key}.name", problem, "give every uplink its own name")
        seen[uplink.name] = index
        for position, name in enumerate(uplink.nodes):
            _check_known(name, names, source, f"{key}.nodes[{position}]")
            if name in uplink.nodes[:position]:
                problem = f"{name!r} is listed twice"
                raise InputError(source, f"{key}.nodes[{position}]", problem, "list every node once")


def _check_known(name: str, names: list[str], source: str, key: str) -> None:
    """Refuse an unknown node, with the nearest known name."""
    if name not in names:
        near = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"nodes: {', '.join(names)[:200]}"
        raise InputError(source, key, f"there is no node {name[:60]!r}", hint)


def _measured(measured: str | list[list[float]], size: int, source: str, folder: Path) -> list[list[float]]:
    """The GPU x GPU matrix in Gbit/s; its diagonal is ignored and set to 0."""
    rows: list[tuple[str, list[Any]]]
    if isinstance(measured, str):
        path = folder / measured
        file, text = str(path), read_text(path, _MAX_MATRIX_BYTES)
        rows = [
            (f"line {number}", line.split(","))
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
    else:
        file = source
        rows = [(f"network.measured[{number}]", row) for number, row in enumerate(measured)]
    remedy = f"give one row and one column per device, {size} of each"
    if len(rows) != size:
        whole = "" if isinstance(measured, str) else "network.measured"
        raise InputError(file, whole, f"has {len(rows)} rows for {size} devices", remedy)
    matrix = []
    for i, (key, cells) in enumerate(rows):
        if len(cells) != size:
            raise InputError(file, key, f"has {len(cells)} columns for {size} devices", remedy)
        matrix.append([0.0 if i == j else _gbit_s(cell, file, key, j) for j, cell in enumerate(cells)])
    return matrix


def _gbit_s(cell: str | float, file: str, key: str, column: int) -> float:
    """The bandwidth in a cell of the matrix."""
    try:
        value = float(cell)
    except (ValueError, OverflowError):
        value = math.nan
    if not SMALLEST <= value <= LARGEST:
        shown = str(cell).strip()[:40]
        problem = f"column {column + 1} is {shown!r}, not a bandwidth"
        raise InputError(file, key, problem, f"give a number from {SMALLEST:g} to {LARGEST:g}, in Gbit/s")
    return value


def _exists(path: Path) -> bool:
    """Whether there is such a file; False for a path that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
