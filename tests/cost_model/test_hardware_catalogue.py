"""The hardware catalogue: names, figures, links and prices."""

import pytest

from cluster_specs.catalogue import catalogue
from cost_model.errors import InputError
from cost_model.hardware import (
    CATALOGUE,
    GIB,
    INTERCONNECT_CLASSES,
    Accelerator,
    find_accelerator,
    interconnect_link,
)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100-80G", "A100-80GB"),
        ("a100", "A100-80GB"),
        ("A100_40gb", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-SXM", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
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


def test_the_nearest_name_is_suggested():
    with pytest.raises(InputError, match="did you mean H100"):
        find_accelerator("H10")


def test_extra_cards_win_over_the_catalogue():
    mine = Accelerator("A100-80GB", 1.0, 2.0, 3.0)
    assert find_accelerator("A100", {"A100-80GB": mine}) is mine
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


def test_every_card_has_a_price_with_its_source():
    entries = catalogue()
    assert list(entries) == list(CATALOGUE)
    assert all(entry.price_per_gpu_hour >= 0 and entry.price_source for entry in entries.values())
    assert [entries[n].price_per_gpu_hour for n in ("H100", "A100-80GB", "L40", "A6000")] == [
        3.69,
        1.69,
        1.03,
        0.76,
    ]
