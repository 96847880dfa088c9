"""All-reduce times against measurements, and their order where there are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import LLAMA_70B, fixed, group_of

from cost_model.calibrated import Calibrated
from cost_model.collectives import MIB, all_reduce_s
from cost_model.hardware import CATALOGUE, INTERCONNECT_CLASSES, Link, interconnect_link

PCIE4, _ = interconnect_link("pcie4", CATALOGUE["L40S"])
NVLINK, _ = interconnect_link("nvlink", CATALOGUE["H100"])
sizes = st.floats(1, 1 << 32)
links = st.sampled_from(
    [interconnect_link(kind, CATALOGUE["A100-80GB"])[0] for kind in INTERCONNECT_CLASSES] + [Link(5e9, 1e-4)]
)


def bus_bandwidth(link: Link, degree: int, size: float) -> float:
    """Bus bandwidth in bytes/s as nccl-tests define it, latency included."""
    return 2 * (degree - 1) / degree * size / all_reduce_s(link, degree, size)


@pytest.mark.parametrize(("cards", "gbyte_s"), [(2, 20), (4, 5.2), (8, 1.4)])
def test_pcie_collapses_as_l40s_were_measured(cards, gbyte_s):
    assert bus_bandwidth(PCIE4, cards, 64 * MIB) == pytest.approx(gbyte_s * 1e9, rel=0.03)


@pytest.mark.parametrize(
    ("size", "microseconds"),
    [
        (64 * 1024, 18.95),
        (512 * 1024, 20.4),
        (1 * MIB, 27.8),
        (4 * MIB, 53.2),
        (16 * MIB, 121),
        (32 * MIB, 195),
    ],
)
def test_eight_h20_as_measured(size, microseconds):
    """NCCL on 8 H20 (kvcache-ai/Mooncake pull request 3484): bus bandwidth of at most 358 GB/s."""
    h20 = Link(358e9, 8e-6, "nvlink")
    assert all_reduce_s(h20, 8, size) == pytest.approx(microseconds * 1e-6, rel=0.15)


def test_a_link_given_by_its_figures_is_taken_at_its_word():
    assert all_reduce_s(Link(20e9, 1e-5), 8, 1e8) == pytest.approx(6e-5 + 1.75 * 1e8 / 20e9)


@given(links, st.integers(2, 16), sizes, sizes)
def test_larger_messages_take_longer_and_use_the_links_better(link, degree, a, b):
    small, large = sorted((a, b))
    first, second = all_reduce_s(link, degree, small), all_reduce_s(link, degree, large)
    assert second >= first * (1 - 1e-12)
    assert large / second >= small / first * (1 - 1e-12)


@given(links, st.integers(1, 15), sizes)
def test_more_devices_take_longer(link, degree, size):
    assert all_reduce_s(link, degree + 1, size) >= all_reduce_s(link, degree, size)


def test_eight_l40s_prefill_no_faster_than_two():
    """This is why the table exists: over PCIe, all-reduces of Llama-2 70B cost as much time as six more cards
    save."""
    costs = Calibrated(LLAMA_70B, fixed(2048, 128))
    two, eight = (costs.layer_s("prefill", group_of("L40S", n, "pcie4"), 1) for n in (2, 8))
    assert eight > two
