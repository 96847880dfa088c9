"""Accelerators and links as the cost models see them: data-sheet figures, in SI units."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cost_model.errors import InputError
from cost_model.gpu_catalogue import DATA_SHEETS, DataSheet, Generation

GIB = 1024**3
DeviceKind = Literal["gpu", "cpu"]
Fabric = Literal["", "nvlink", "pcie"]


@dataclass(frozen=True)
class Accelerator:
    """One device type.

    memory_bytes is the whole device memory, flops_s the dense bf16 (or best 16-bit) peak without
    sparsity, memory_bandwidth_bytes_s the peak of the memory bus. fp8_speedup, int8_speedup and fp4_speedup
    are dense peaks over flops_s (1: no such tensor cores). `generation` decides which formats have kernels
    (cost_model/dtypes.py). `source` says where the figures come from; it and those after it do not take
    part in comparisons.
    """

    name: str
    memory_bytes: float
    flops_s: float
    memory_bandwidth_bytes_s: float
    kind: DeviceKind = "gpu"
    source: str = field(default="", compare=False)
    generation: Generation = field(default="", compare=False)
    fp8_speedup: float = field(default=1.0, compare=False)
    int8_speedup: float = field(default=1.0, compare=False)
    fp4_speedup: float = field(default=1.0, compare=False)


@dataclass(frozen=True)
class Link:
    """A directed connection between two devices.

    The fabric decides how much of it collectives get (cost_model/collectives.py); "" for a network, or a link
    given by its figures, of which that is not known."""

    bandwidth_bytes_s: float
    latency_s: float
    fabric: Fabric = ""


NO_LINK = Link(float("inf"), 0.0)
"""The link from a device to itself, or where communication is assumed to be free."""


def _from_data_sheet(sheet: DataSheet) -> Accelerator:
    """The card in SI units."""
    peaks = (sheet.fp8, sheet.int8, sheet.fp4)
    fp8, int8, fp4 = (1.0 if peak is None else peak / sheet.dense_16_bit for peak in peaks)
    return Accelerator(
        sheet.name,
        sheet.memory_gib * GIB,
        sheet.dense_16_bit * 1e12,
        sheet.gbyte_s * 1e9,
        "gpu",
        sheet.source,
        sheet.generation,
        fp8,
        int8,
        fp4,
    )


_CPU = Accelerator(
    "CPU",
    4 * GIB,
    240e9,
    20.5e9,
    "cpu",
    "fp32 matrix product and memory read measured on 2 AVX-512 cores; 4 GiB assumed",
    "cpu",
)
_SHEETS = {sheet.name: sheet for sheet in DATA_SHEETS}
CATALOGUE: dict[str, Accelerator] = {card.name: card for card in (*map(_from_data_sheet, DATA_SHEETS), _CPU)}

# Peaks of fp8, int8 and fp4 over 16-bit ones.
_USUAL_SPEEDUPS: dict[Generation, tuple[float, float, float]] = {
    **dict.fromkeys(("turing", "ampere"), (1.0, 2.0, 1.0)),
    **dict.fromkeys(("ada", "hopper", "cdna3"), (2.0, 2.0, 1.0)),
    "blackwell": (2.0, 2.0, 4.0),
}


def of_generation(generation: Generation) -> Accelerator:
    """A card without figures but the usual speedups of its generation, for one that the catalogue lacks."""
    fp8, int8, fp4 = _USUAL_SPEEDUPS.get(generation, (1.0, 1.0, 1.0))
    return Accelerator("", 0.0, 0.0, 0.0, "gpu", "", generation, fp8, int8, fp4)


_BARE_NAMES = {"A800": "A800-80GB", "V100": "V100-16GB"}
_AMBIGUOUS = {"A100": "A100-80GB or A100-40GB (SXM), A100-80GB-PCIe or A100-40GB-PCIe"}
_NOISE = re.compile(
    r"NVIDIA|TESLA|GEFORCE|QUADRO|RTX|AMD|INSTINCT|OAM|GPU|SXM\d?|HBM\d?E?|BLACKWELL|SERVER|EDITION|AC"
)
_MEMORY = re.compile(r"(\d+)G(?:I?B)?")

_LooseKey = tuple[str, frozenset[str]]


def _loose_key(name: str) -> _LooseKey | None:
    """The model's token and the set of qualifiers in a name; None if nothing remains of it."""
    text = re.sub(r"PRO[ _-]?6000", "PRO6000", name.upper())
    tokens = [re.sub(r"^RTX(?=[A-Z0-9])", "", t) for t in re.findall(r"[A-Z0-9]+", text)]
    tokens = [
        _MEMORY.sub(r"\1GB", t) if _MEMORY.fullmatch(t) else t for t in tokens if not _NOISE.fullmatch(t)
    ]
    return (tokens[0], frozenset(tokens[1:])) if tokens else None


def _catalogue_aliases() -> dict[_LooseKey, str]:
    """All spellings of each card: its name, with its memory size, and with its form factor unless the card
    in PCIe form is another one."""
    keys = {card.name: _loose_key(card.name) for card in CATALOGUE.values()}
    aliases: dict[_LooseKey, str] = {}
    for card in CATALOGUE.values():
        key = keys[card.name]
        assert key is not None
        model, qualifiers = key
        memory = f"{round(card.memory_bytes / GIB)}GB"
        for form in (qualifiers, qualifiers | {memory}):
            aliases[(model, form)] = card.name
            if (model, qualifiers | {"PCIE"}) not in keys.values():
                aliases[(model, form | {"PCIE"})] = card.name
    for bare, name in _BARE_NAMES.items():
        aliases[(bare, frozenset())] = name
        aliases[(bare, frozenset({"PCIE"}))] = aliases[(bare, frozenset({*name.split("-")[1:], "PCIE"}))]
    return aliases


_ALIASES = _catalogue_aliases()


def find_accelerator(
    name: str,
    extra: Mapping[str, Accelerator] | None = None,
    *,
    source: str = "accelerator",
    key: str = "",
) -> Accelerator:
    """The card of that name, in any usual spelling, from `extra` (which wins) or the catalogue.

    Case, dashes, underscores, spaces, "NVIDIA", "Tesla", "RTX", "-SXM" and "80G" for "80GB" do not
    matter. Bare "V100" is the 16 GB card; a name in PCIe form is the catalogue's card of the same memory
    unless it has one in that form.

    Raises
    ------
    InputError : unknown name, with `source`, `key` and the nearest known names; a bare A100, which is one of
        four cards
    """
    extra = extra or {}
    wanted = _loose_key(name)
    if name in extra:
        return extra[name]
    for extra_name, card in extra.items():
        if wanted is not None and _loose_key(extra_name) == wanted:
            return card
    canonical = _ALIASES.get(wanted) if wanted else None
    if canonical is not None:
        return extra.get(canonical, CATALOGUE[canonical])
    if wanted is not None and wanted[0] in _AMBIGUOUS and wanted[1] <= {"PCIE"}:
        problem = f"{name[:60]!r} is sold with 40 and with 80 GB"
        raise InputError(source, key, problem, f"write {_AMBIGUOUS[wanted[0]]}")
    known = {known_name.upper(): known_name for known_name in [*extra, *CATALOGUE]}
    near = difflib.get_close_matches(name.upper()[:100], known, n=1, cutoff=0.4)
    hint = f"did you mean {known[near[0]]}?" if near else f"known: {', '.join(known.values())}"
    raise InputError(
        source, key, f"unknown accelerator {name[:60]!r}", f"{hint} Or describe it under accelerators"
    )


# Bus bandwidth per GPU, one direction, bytes/s. H100, A100 and V100 are mid-range of published NCCL
# all-reduce measurements (H100 318-445, A100 193-222 GB/s), B200 and H20 those of 512 MiB and of 1 GiB among
# 8 GPUs (NCCL times in AIConfigurator's B200 database; kvcache-ai/Mooncake pull request 3484). The rest is
# scaled from the nominal rate. Of H100-NVL, A100-PCIe and A30, bridges join pairs of cards only.
_NVLINK_MEASURED = {"H200": 380e9, "H100": 380e9, "A100": 200e9, "V100": 130e9, "B200": 640e9, "H20": 358e9}
_NVLINK_ASSUMED = {
    **{"A800": 130e9, "A6000": 40e9, "A40": 40e9, "3090": 40e9, "P100": 60e9, "A30": 70e9},
    **{"GB200": 640e9, "B300": 640e9, "GB300": 640e9},
}
_NVLINK_OF_FORMS = {
    "H100-NVL": 250e9,
    "A100-80GB-PCIe": 200e9,
    "A100-40GB-PCIe": 200e9,
    "H100-PCIe": 200e9,
}
_NVLINK_LATENCY_S = 8e-6

# Bytes/s: seven links of 64 GB/s join each of 8 cards with the others; two thirds of their sum, as RCCL is
# to reach in AMD's acceptance tests.
_INFINITY_FABRIC_BYTES_S = 300e9

# Bytes/s and seconds. pcie4: two L40S measured at 20 GB/s of 32 nominal. shared-memory: 6 GB/s in 1 MB
# messages and 0.18 ms for 4 KB between two processes of one host, both measured.
_CLASS_LINKS = {
    "pcie3": Link(10e9, 10e-6, "pcie"),
    "pcie4": Link(20e9, 10e-6, "pcie"),
    "pcie5": Link(40e9, 10e-6, "pcie"),
    "shared-memory": Link(6e9, 180e-6),
}
_CLASS_ASSUMPTIONS = {
    "pcie3": "PCIe 3.0 taken as 10 GB/s: half of what was measured on PCIe 4.0",
    "pcie5": "PCIe 5.0 taken as 40 GB/s: twice what was measured on PCIe 4.0",
}
INTERCONNECT_CLASSES = ("nvlink", "infinity-fabric", *_CLASS_LINKS)


def pcie_class(accelerator: Accelerator) -> str:
    """The PCIe generation of the card's slot: pcie4 if unknown."""
    sheet = _SHEETS.get(accelerator.name)
    return f"pcie{sheet.pcie}" if sheet else "pcie4"


def usual_interconnect(accelerator: Accelerator) -> str:
    """The default interconnect of such devices in one node: NVLink if the card's usual form has it."""
    if accelerator.kind == "cpu":
        return "shared-memory"
    sheet = _SHEETS.get(accelerator.name)
    return (sheet.link if sheet else "") or pcie_class(accelerator)


def interconnect_link(interconnect: str, accelerator: Accelerator) -> tuple[Link, str | None]:
    """The link between two devices of one node, and the assumption it rests on (None: measured).

    Parameters
    ----------
    interconnect : one of INTERCONNECT_CLASSES (KeyError otherwise)
    accelerator : the card, which decides the NVLink generation
    """
    name = accelerator.name
    if interconnect in _CLASS_LINKS:
        return _CLASS_LINKS[interconnect], _CLASS_ASSUMPTIONS.get(interconnect)
    if interconnect not in INTERCONNECT_CLASSES:
        raise KeyError(interconnect)
    of_amd = accelerator.generation == "cdna3"
    if of_amd != (interconnect == "infinity-fabric") and name in CATALOGUE:
        missing = "NVLink" if interconnect == "nvlink" else "Infinity Fabric"
        return _CLASS_LINKS["pcie4"], f"{name} has no {missing}: PCIe 4.0 taken instead"
    if interconnect == "infinity-fabric":
        rate = _INFINITY_FABRIC_BYTES_S
        assumption = (
            f"Infinity Fabric of {name} taken as {rate / 1e9:g} GB/s, with NVLink's latency (not measured)"
        )
        return Link(rate, _NVLINK_LATENCY_S, "nvlink"), assumption
    nvlink, measured = _nvlink_rate(accelerator)
    if nvlink is None:
        return _CLASS_LINKS["pcie4"], f"{name} has no NVLink: PCIe 4.0 taken instead"
    like = ", like A100" if name not in CATALOGUE and nvlink == _NVLINK_MEASURED["A100"] else ""
    assumption = f"NVLink of {name} taken as {nvlink / 1e9:g} GB/s{like} (not measured)"
    return Link(nvlink, _NVLINK_LATENCY_S, "nvlink"), None if measured else assumption


def _nvlink_rate(accelerator: Accelerator) -> tuple[float | None, bool]:
    """Bytes/s of the card's NVLink, and whether they were measured; None if it has no NVLink. A card that the
    catalogue lacks counts as the one that its name begins with, or else as an A100."""
    name, key = accelerator.name, _loose_key(accelerator.name)
    model, form = key if key else ("", frozenset())
    if name in _NVLINK_OF_FORMS:
        return _NVLINK_OF_FORMS[name], False
    if model in _NVLINK_MEASURED and not form & {"PCIE", "NVL"}:
        return _NVLINK_MEASURED[model], True
    if model in _NVLINK_ASSUMED:
        return _NVLINK_ASSUMED[model], False
    return (None if name in CATALOGUE else _NVLINK_MEASURED["A100"]), False
