"""The hardware catalogue: names, figures, links and prices."""

import pytest

from cluster_specs.catalogue import catalogue
from cost_model.errors import InputError
from cost_model.gpu_catalogue import DATA_SHEETS
from cost_model.hardware import (
    CATALOGUE,
    GIB,
    INTERCONNECT_CLASSES,
    Accelerator,
    find_accelerator,
    interconnect_link,
    usual_interconnect,
)

PCIE_CARDS = (
    *("H100-NVL", "H100-PCIe", "A100-80GB-PCIe", "A100-40GB-PCIe", "A30", "L40S", "L40", "L4", "A40", "A10G"),
    *("A6000", "RTX-PRO-6000", "RTX5090", "RTX4090", "RTX3090", "V100-32GB-PCIe", "V100-16GB-PCIe", "T4"),
    *("P100", "P100-12GB"),
)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100-80G", "A100-80GB"),
        ("a100 80gb", "A100-80GB"),
        ("A100_40gb", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-SXM", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("nvidia-gb200", "GB200"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("rtx_pro_6000", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("mi325x", "MI325X"),
        ("Tesla V100-PCIE-16GB", "V100-16GB-PCIe"),
        ("V100-PCIe", "V100-16GB-PCIe"),
        ("V100-16G", "V100-16GB"),
        ("v100", "V100-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla T4", "T4"),
        ("RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("4090", "RTX4090"),
        ("Tesla P100-PCIE-12GB", "P100-12GB"),
        ("A800 80GB PCIe", "A800-80GB"),
        ("cpu", "CPU"),
        *((name, name) for name in CATALOGUE),
    ],
)
def test_names_match_loosely(spelling, name):
    assert find_accelerator(spelling).name == name


@pytest.mark.parametrize("wrong", ["RTX 3090 Ti", "H10", "A100-60GB", "L40-PCI", "", "!!", ":"])
def test_unknown_name_is_one_line_with_file_key_and_remedy(wrong):
    with pytest.raises(InputError) as caught:
        find_accelerator(wrong, source="c.yaml", key="nodes[2].accelerators")
    message = str(caught.value)
    assert message.startswith("c.yaml: nodes[2].accelerators: ") and "\n" not in message
    assert "did you mean" in message or "known:" in message


@pytest.mark.parametrize("bare", ["A100", "a100", "NVIDIA A100", "A100-SXM4", "A100 PCIe"])
def test_a_bare_a100_is_one_of_four_cards(bare):
    with pytest.raises(InputError, match=r"write A100-80GB or A100-40GB \(SXM\), A100-80GB-PCIe or"):
        find_accelerator(bare)


def test_the_nearest_name_is_suggested():
    with pytest.raises(InputError, match="did you mean H100"):
        find_accelerator("H10")


def test_extra_cards_win_over_the_catalogue():
    mine = Accelerator("A100-80GB", 1.0, 2.0, 3.0)
    assert find_accelerator("A100-80GB", {"A100-80GB": mine}) is mine
    own = Accelerator("MyCard", 1.0, 2.0, 3.0)
    assert find_accelerator("my_card".replace("_", ""), {"MyCard": own}) is own


def test_figures_are_dense_and_in_si_units():
    h100 = CATALOGUE["H100"]
    assert h100.flops_s == pytest.approx(989.4e12) and h100.memory_bytes == 80 * GIB
    assert CATALOGUE["L4"].flops_s == pytest.approx(121e12), "the data sheet's 242 is with sparsity"
    assert all(card.source for card in CATALOGUE.values())
    assert all("fp16" in CATALOGUE[name].source for name in ("V100-16GB", "V100-32GB", "T4", "P100"))


@pytest.mark.parametrize("interconnect", INTERCONNECT_CLASSES)
@pytest.mark.parametrize("card", CATALOGUE.values(), ids=lambda card: card.name)
def test_every_class_has_a_link_for_every_card(interconnect, card):
    link, assumption = interconnect_link(interconnect, card)
    assert link.bandwidth_bytes_s >= 1e9 and 0 < link.latency_s < 1e-3
    assert assumption is None or card.name in assumption or "PCIe" in assumption


def test_only_measured_links_are_free_of_assumptions():
    def assumed(interconnect, name):
        return interconnect_link(interconnect, CATALOGUE[name])[1] is not None

    assert (
        not assumed("nvlink", "A100-80GB") and not assumed("nvlink", "H100") and not assumed("pcie4", "L40S")
    )
    assert assumed("nvlink", "A6000") and assumed("nvlink", "L40") and assumed("pcie3", "T4")
    assert interconnect_link("nvlink", CATALOGUE["L40"])[0] == interconnect_link("pcie4", CATALOGUE["L40"])[0]


def test_b200_reaches_what_nccl_measured_and_its_relatives_are_assumed():
    """641 GB/s of bus bandwidth among 8 in messages of 512 MiB."""
    link, assumption = interconnect_link("nvlink", CATALOGUE["B200"])
    assert link.bandwidth_bytes_s == pytest.approx(641e9, rel=0.01) and assumption is None
    assert all("not measured" in interconnect_link("nvlink", CATALOGUE[n])[1] for n in ("B300", "GB200"))


@pytest.mark.parametrize("card", CATALOGUE.values(), ids=lambda card: card.name)
def test_the_usual_interconnect_is_one_that_the_card_has(card):
    usual = usual_interconnect(card)
    assert "has no" not in (interconnect_link(usual, card)[1] or "")
    assert usual.startswith("pcie") == (card.name in PCIE_CARDS)


def test_each_link_belongs_to_its_maker():
    assert usual_interconnect(CATALOGUE["MI300X"]) == "infinity-fabric"
    for interconnect, name in (("nvlink", "MI300X"), ("infinity-fabric", "H100")):
        assert interconnect_link(interconnect, CATALOGUE[name])[0].fabric == "pcie"


def test_peaks_of_fewer_bits_are_multiples_of_those_of_16():
    """Tensor cores double the rate with half the bits; with fp32 accumulation, GeForce cards do 16 bits and
    fp8 at half rate. Blackwell Ultra has half as much fp4 again."""
    for sheet in DATA_SHEETS:
        ratios = [peak / sheet.dense_16_bit for peak in (sheet.fp8, sheet.int8, sheet.fp4) if peak]
        assert all(any(abs(ratio / n - 1) < 0.02 for n in (2, 4, 6, 8)) for ratio in ratios), sheet.name
        assert sheet.generation, sheet.name


def test_prices_have_a_source_or_are_left_out():
    entries = catalogue()
    assert list(entries) == list(CATALOGUE)
    priced = {name: entry for name, entry in entries.items() if entry.price_per_gpu_hour is not None}
    assert all(entry.price_per_gpu_hour >= 0 and entry.price_source for entry in priced.values())
    assert [priced[n].price_per_gpu_hour for n in ("H100", "A100-80GB", "L40", "A6000")] == [
        3.69,
        1.69,
        1.03,
        0.76,
    ]
