"""The cards that ship, as their data sheets state them. `cost_model/hardware.py` looks them up and knows
their links; `cluster_specs/prices.yaml` has prices.

Memory is the nominal size of the data sheet read as GiB; drivers report 0-6 % less. Where a data sheet
states throughput only with sparsity, half of that is used. GeForce cards do bf16 and fp8 at half rate with
fp32 accumulation, but not int8 and fp4."""

from __future__ import annotations

from typing import Literal, NamedTuple

Generation = Literal["", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna3", "cpu"]
"""What the efficiencies and kernels of cards have in common; "" if it is not known."""


class DataSheet(NamedTuple):
    """One card. Peaks are dense, without sparsity, in TFLOP/s (TOP/s for int8), by number format; None where
    the card has no tensor cores for the format, or no public figure. 16-bit is bf16 where the card has it.

    `processors` counts streaming multiprocessors or compute units, None where no source is sure; `pcie` is
    the generation of the slot; `link` how such cards are usually joined in a node: "" is over PCIe.
    """

    name: str
    generation: Generation
    memory_gib: float
    gbyte_s: float
    dense_16_bit: float
    source: str
    fp8: float | None = None
    int8: float | None = None
    fp4: float | None = None
    processors: int | None = None
    pcie: Literal[3, 4, 5] = 4
    link: Literal["", "nvlink", "infinity-fabric"] = ""


_NVIDIA_BLACKWELL = "NVIDIA Blackwell architecture data sheet"
_NO_BF16 = "no bf16: fp16 tensor cores"
_NO_TENSOR_CORES = "no bf16, no tensor cores: plain fp16"

# fmt: off
DATA_SHEETS = [
    # 288 GB are 268 GiB. INT8 is left out: Blackwell Ultra has little of it, and vLLM has no kernels for it.
    DataSheet("GB300", "blackwell", 278, 8000, 2500, "NVIDIA GB300 NVL72 data sheet, per GPU (20 TB of 72)",
              fp8=5000, fp4=15000, pcie=5, link="nvlink"),
    DataSheet("B300", "blackwell", 268, 8000, 2250, "NVIDIA HGX B300 data sheet, per GPU (2.1 TB of 8)",
              fp8=4500, fp4=13500, pcie=5, link="nvlink"),
    DataSheet("GB200", "blackwell", 186, 8000, 2500, "NVIDIA GB200 NVL72 data sheet, per GPU",
              fp8=5000, int8=5000, fp4=10000, pcie=5, link="nvlink"),
    DataSheet("B200", "blackwell", 180, 7700, 2250, f"{_NVIDIA_BLACKWELL}, HGX B200, per GPU",
              fp8=4500, int8=4500, fp4=9000, processors=148, pcie=5, link="nvlink"),
    DataSheet("H200", "hopper", 141, 4800, 989.4, "NVIDIA H200 SXM data sheet",
              fp8=1978.9, int8=1978.9, processors=132, pcie=5, link="nvlink"),
    DataSheet("H100", "hopper", 80, 3350, 989.4, "NVIDIA H100 data sheet, SXM5 80 GB",
              fp8=1978.9, int8=1978.9, processors=132, pcie=5, link="nvlink"),
    DataSheet("H100-NVL", "hopper", 94, 3938, 835.5, "NVIDIA H100 NVL data sheet, 94 GB",
              fp8=1671, int8=1671, processors=132, pcie=5),
    DataSheet("H100-PCIe", "hopper", 80, 2039, 756, "NVIDIA H100 data sheet, PCIe 80 GB",
              fp8=1513, int8=1513, processors=114, pcie=5),
    DataSheet("H20", "hopper", 96, 4000, 148, "H20 96 GB as vendors list it: NVIDIA has no public sheet",
              fp8=296, int8=296, processors=78, pcie=5, link="nvlink"),
    DataSheet("A100-80GB", "ampere", 80, 2039, 312, "NVIDIA A100 data sheet, SXM4 80 GB",
              int8=624, processors=108, link="nvlink"),
    DataSheet("A100-80GB-PCIe", "ampere", 80, 1935, 312, "NVIDIA A100 data sheet, PCIe 80 GB",
              int8=624, processors=108),
    DataSheet("A100-40GB", "ampere", 40, 1555, 312, "NVIDIA A100 data sheet, SXM4 40 GB",
              int8=624, processors=108, link="nvlink"),
    DataSheet("A100-40GB-PCIe", "ampere", 40, 1555, 312, "NVIDIA A100 data sheet, PCIe 40 GB",
              int8=624, processors=108),
    DataSheet("A800-80GB", "ampere", 80, 1935, 312, "NVIDIA A800 data sheet, PCIe 80 GB",
              int8=624, processors=108, link="nvlink"),
    DataSheet("A30", "ampere", 24, 933, 165, "NVIDIA A30 data sheet", int8=330, processors=56),
    DataSheet("L40S", "ada", 48, 864, 362, "NVIDIA L40S data sheet", fp8=733, int8=733, processors=142),
    DataSheet("L40", "ada", 48, 864, 181, "NVIDIA L40 data sheet", fp8=362, int8=362, processors=142),
    DataSheet("L4", "ada", 24, 300, 121, "NVIDIA L4 data sheet", fp8=242, int8=242, processors=58),
    DataSheet("A40", "ampere", 48, 696, 149.7, "NVIDIA A40 data sheet", int8=299.4, processors=84),
    DataSheet("A10G", "ampere", 24, 600, 70, "NVIDIA A10G data sheet (AWS G5)", int8=140),
    DataSheet("A6000", "ampere", 48, 768, 154.8, "NVIDIA RTX A6000 data sheet, Ampere GA102 white paper",
              int8=309.6, processors=84),
    DataSheet("RTX-PRO-6000", "blackwell", 96, 1597, 467.8,
              "NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet, RTX Blackwell PRO white paper",
              fp8=935.6, int8=935.6, fp4=1871.2, processors=188, pcie=5),
    DataSheet("RTX5090", "blackwell", 32, 1792, 209.5,
              "NVIDIA RTX Blackwell white paper, bf16 and fp8 with fp32 accumulation",
              fp8=419, int8=838, fp4=1676, processors=170, pcie=5),
    DataSheet("RTX4090", "ada", 24, 1008, 165.2, "NVIDIA Ada white paper, bf16 with fp32 accumulation",
              fp8=330.4, int8=660.8, processors=128),
    DataSheet("RTX3090", "ampere", 24, 936, 71,
              "NVIDIA Ampere GA102 white paper, bf16 with fp32 accumulation", int8=284, processors=82),
    DataSheet("V100-32GB", "volta", 32, 900, 125, f"NVIDIA V100 data sheet, SXM2; {_NO_BF16}",
              processors=80, pcie=3, link="nvlink"),
    DataSheet("V100-32GB-PCIe", "volta", 32, 900, 112, f"NVIDIA V100 data sheet, PCIe; {_NO_BF16}",
              processors=80, pcie=3),
    DataSheet("V100-16GB", "volta", 16, 900, 125, f"NVIDIA V100 data sheet, SXM2; {_NO_BF16}",
              processors=80, pcie=3, link="nvlink"),
    DataSheet("V100-16GB-PCIe", "volta", 16, 900, 112, f"NVIDIA V100 data sheet, PCIe; {_NO_BF16}",
              processors=80, pcie=3),
    DataSheet("T4", "turing", 16, 320, 65, f"NVIDIA T4 data sheet; {_NO_BF16}",
              int8=130, processors=40, pcie=3),
    DataSheet("P100", "pascal", 16, 732, 18.7, f"NVIDIA P100 data sheet, PCIe 16 GB; {_NO_TENSOR_CORES}",
              processors=56, pcie=3),
    DataSheet("P100-12GB", "pascal", 12, 549, 18.7, f"NVIDIA P100 data sheet, PCIe 12 GB; {_NO_TENSOR_CORES}",
              processors=56, pcie=3),
    DataSheet("MI325X", "cdna3", 256, 6000, 1307.4, "AMD Instinct MI325X data sheet",
              fp8=2614.9, int8=2614.9, processors=304, pcie=5, link="infinity-fabric"),
    DataSheet("MI300X", "cdna3", 192, 5300, 1307.4, "AMD Instinct MI300X data sheet",
              fp8=2614.9, int8=2614.9, processors=304, pcie=5, link="infinity-fabric"),
]
# fmt: on
