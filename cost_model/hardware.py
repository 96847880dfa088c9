"""Accelerators and links as the cost models see them: data-sheet figures, in SI units."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cost_model.errors import InputError

GIB = 1024**3
DeviceKind = Literal["gpu", "cpu"]
Fabric = Literal["", "nvlink", "pcie"]


@dataclass(frozen=True)
class Accelerator:
    """One device type.

    memory_bytes is the whole device memory, flops_s the dense bf16 (or best 16-bit) peak without
    sparsity, memory_bandwidth_bytes_s the peak of the memory bus. fp8_speedup and int8_speedup are dense
    8-bit peaks over flops_s (1: no such tensor cores). `source` says where the figures come from; it and
    the speedups do not take part in comparisons.
    """

    name: str
    memory_bytes: float
    flops_s: float
    memory_bandwidth_bytes_s: float
    kind: DeviceKind = "gpu"
    source: str = field(default="", compare=False)
    fp8_speedup: float = field(default=1.0, compare=False)
    int8_speedup: float = field(default=1.0, compare=False)


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


# Dense 8-bit peaks over the 16-bit ones below, from the same sources. GeForce cards do fp8 and bf16 at half
# rate with fp32 accumulation, but not int8.
_FP8_SPEEDUP = dict.fromkeys(("H200", "H100", "H100-PCIe", "L40S", "L40", "L4", "RTX4090"), 2.0)
_INT8_SPEEDUP = dict.fromkeys(
    (*_FP8_SPEEDUP, "A100-80GB", "A100-40GB", "A800-80GB", "A40", "A10G", "A6000", "T4"), 2.0
) | {"RTX4090": 4.0, "RTX3090": 4.0}


def _gpu(name: str, memory_gib: float, tflops: float, gbyte_s: float, source: str) -> Accelerator:
    """A GPU from the figures in the units of data sheets."""
    return Accelerator(
        name,
        memory_gib * GIB,
        tflops * 1e12,
        gbyte_s * 1e9,
        "gpu",
        source,
        _FP8_SPEEDUP.get(name, 1.0),
        _INT8_SPEEDUP.get(name, 1.0),
    )


# Memory is the nominal size of the data sheet read as GiB; drivers report 0-6 % less.
# If a data sheet states 16-bit throughput only with sparsity, half of that is used.
_CARDS = [
    _gpu("H200", 141, 989.4, 4800, "NVIDIA H200 SXM data sheet"),
    _gpu("H100", 80, 989.4, 3350, "NVIDIA H100 data sheet, SXM5 80 GB"),
    _gpu("H100-PCIe", 80, 756, 2039, "NVIDIA H100 data sheet, PCIe 80 GB"),
    _gpu("A100-80GB", 80, 312, 2039, "NVIDIA A100 data sheet, SXM4 80 GB"),
    _gpu("A100-40GB", 40, 312, 1555, "NVIDIA A100 data sheet, 40 GB"),
    _gpu("A800-80GB", 80, 312, 1935, "NVIDIA A800 data sheet, PCIe 80 GB"),
    _gpu("L40S", 48, 362, 864, "NVIDIA L40S data sheet"),
    _gpu("L40", 48, 181, 864, "NVIDIA L40 data sheet"),
    _gpu("L4", 24, 121, 300, "NVIDIA L4 data sheet"),
    _gpu("A40", 48, 149.7, 696, "NVIDIA A40 data sheet"),
    _gpu("A10G", 24, 70, 600, "NVIDIA A10G data sheet (AWS G5)"),
    _gpu("A6000", 48, 154.8, 768, "NVIDIA RTX A6000 data sheet, Ampere GA102 white paper"),
    _gpu("RTX4090", 24, 165.2, 1008, "NVIDIA Ada white paper, bf16 with fp32 accumulation"),
    _gpu("RTX3090", 24, 71, 936, "NVIDIA Ampere GA102 white paper, bf16 with fp32 accumulation"),
    _gpu("V100-32GB", 32, 125, 900, "NVIDIA V100 data sheet, SXM2; no bf16: fp16 tensor cores"),
    _gpu("V100-16GB", 16, 125, 900, "NVIDIA V100 data sheet, SXM2; no bf16: fp16 tensor cores"),
    _gpu("T4", 16, 65, 320, "NVIDIA T4 data sheet; no bf16: fp16 tensor cores"),
    _gpu("P100", 16, 18.7, 732, "NVIDIA P100 data sheet, PCIe 16 GB; no bf16, no tensor cores: plain fp16"),
    _gpu(
        "P100-12GB", 12, 18.7, 549, "NVIDIA P100 data sheet, PCIe 12 GB; no bf16, no tensor cores: plain fp16"
    ),
    Accelerator(
        "CPU",
        4 * GIB,
        240e9,
        20.5e9,
        "cpu",
        "fp32 matrix product and memory read measured on 2 AVX-512 cores; 4 GiB assumed",
    ),
]

CATALOGUE: dict[str, Accelerator] = {card.name: card for card in _CARDS}

_BARE_NAMES = {"A100": "A100-80GB", "A800": "A800-80GB", "V100": "V100-16GB"}
_NOISE = re.compile(r"NVIDIA|TESLA|GEFORCE|QUADRO|RTX|GPU|SXM\d?|HBM\d?E?")
_MEMORY = re.compile(r"(\d+)G(?:I?B)?")

_LooseKey = tuple[str, frozenset[str]]


def _loose_key(name: str) -> _LooseKey | None:
    """The model's token and the set of qualifiers in a name; None if nothing remains of it."""
    tokens = [re.sub(r"^RTX(?=[A-Z0-9])", "", t) for t in re.findall(r"[A-Z0-9]+", name.upper())]
    tokens = [
        _MEMORY.sub(r"\1GB", t) if _MEMORY.fullmatch(t) else t for t in tokens if not _NOISE.fullmatch(t)
    ]
    return (tokens[0], frozenset(tokens[1:])) if tokens else None


def _catalogue_aliases() -> dict[_LooseKey, str]:
    """All spellings of each card: its name, with its memory size, and with its form factor."""
    aliases: dict[_LooseKey, str] = {}
    for card in CATALOGUE.values():
        key = _loose_key(card.name)
        assert key is not None
        model, qualifiers = key
        memory = f"{round(card.memory_bytes / GIB)}GB"
        for form in (qualifiers, qualifiers | {memory}):
            aliases[(model, form)] = card.name
            if model != "H100":
                aliases[(model, form | {"PCIE"})] = card.name
    for bare, name in _BARE_NAMES.items():
        aliases[(bare, frozenset())] = aliases[(bare, frozenset({"PCIE"}))] = name
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
    matter. Bare "A100" is the 80 GB card, bare "V100" the 16 GB one; A100, A800, V100, P100 and the
    like in PCIe form are taken for the catalogue's card of the same memory.

    Raises
    ------
    InputError : unknown name, with `source`, `key` and the nearest known names
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
    known = {known_name.upper(): known_name for known_name in [*extra, *CATALOGUE]}
    near = difflib.get_close_matches(name.upper()[:100], known, n=1, cutoff=0.4)
    hint = f"did you mean {known[near[0]]}?" if near else f"known: {', '.join(known.values())}"
    raise InputError(
        source, key, f"unknown accelerator {name[:60]!r}", f"{hint} Or describe it under accelerators"
    )


# Bus bandwidth per GPU, one direction, bytes/s. H100, A100 and V100 are mid-range of published NCCL
# all-reduce measurements (H100 318-445, A100 193-222 GB/s); the rest is scaled from the nominal rate.
_NVLINK_MEASURED = {"H200": 380e9, "H100": 380e9, "A100": 200e9, "V100": 130e9}
_NVLINK_ASSUMED = {"A800": 130e9, "A6000": 40e9, "A40": 40e9, "3090": 40e9, "P100": 60e9}
_NVLINK_LATENCY_S = 8e-6

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
INTERCONNECT_CLASSES = ("nvlink", *_CLASS_LINKS)
_PCIE3_CARDS = ("V100-32GB", "V100-16GB", "T4", "P100", "P100-12GB")
_PCIE5_CARDS = ("H200", "H100", "H100-PCIe")


def pcie_class(accelerator: Accelerator) -> str:
    """The PCIe generation of the card's slot: pcie4 if unknown."""
    if accelerator.name in _PCIE3_CARDS:
        return "pcie3"
    return "pcie5" if accelerator.name in _PCIE5_CARDS else "pcie4"


def usual_interconnect(accelerator: Accelerator) -> str:
    """The default interconnect of such devices in one node: NVLink if the card's usual form has it."""
    if accelerator.kind == "cpu":
        return "shared-memory"
    link = interconnect_link("nvlink", accelerator)[0]
    usual = accelerator.name.startswith(("H200", "H100", "A100", "A800", "V100")) and link.fabric == "nvlink"
    return "nvlink" if usual and not accelerator.name.endswith("PCIe") else pcie_class(accelerator)


def interconnect_link(interconnect: str, accelerator: Accelerator) -> tuple[Link, str | None]:
    """The link between two devices of one node, and the assumption it rests on (None: measured).

    Parameters
    ----------
    interconnect : one of INTERCONNECT_CLASSES (KeyError otherwise)
    accelerator : the card, which decides the NVLink generation
    """
    if interconnect != "nvlink":
        return _CLASS_LINKS[interconnect], _CLASS_ASSUMPTIONS.get(interconnect)
    key = _loose_key(accelerator.name)
    model = key[0] if key else ""
    if model in _NVLINK_MEASURED and "PCIE" not in (key[1] if key else ()):
        return Link(_NVLINK_MEASURED[model], _NVLINK_LATENCY_S, "nvlink"), None
    if model in _NVLINK_ASSUMED:
        rate = _NVLINK_ASSUMED[model]
        return Link(
            rate, _NVLINK_LATENCY_S, "nvlink"
        ), f"NVLink of {accelerator.name} taken as {rate / 1e9:g} GB/s (not measured)"
    if accelerator.name in CATALOGUE and model != "H100":
        return _CLASS_LINKS["pcie4"], f"{accelerator.name} has no NVLink: PCIe 4.0 taken instead"
    return Link(
        200e9, _NVLINK_LATENCY_S, "nvlink"
    ), f"NVLink of {accelerator.name} taken as 200 GB/s, like A100 (not measured)"
