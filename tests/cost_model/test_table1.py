"""Table 1 against a second transcription of the paper's formulas, in the paper's letters and totals.

H hidden size, B bytes per value, n devices of a stage, c FLOP/s, m bytes/s, a seconds, beta bytes/s, b batch,
and the layers of a stage.
"""

from __future__ import annotations

import pytest
from shapes import LLAMA_70B, NO_LINK, fixed, group_of

from cost_model.base import TensorGroup
from cost_model.hardware import CATALOGUE, Accelerator, Link
from cost_model.models import find_model
from cost_model.table1 import Table1

GIB = 1024**3


class Paper:
    """The cells of Table 1 for a stage of equal devices with equal links, and for a whole request."""

    def __init__(self, H, B, n, c, m, a, beta):
        self.H, self.B, self.n, self.c, self.m, self.a, self.beta = H, B, n, c, m, a, beta

    def prefill_computation(self, b, s_in, layers):
        return max(24 * b * s_in * self.H**2 / (self.n * self.c) for _ in range(self.n)) * layers

    def decode_computation(self, b, s_out, layers):
        scan = max(12 * self.H**2 * self.B * s_out / (self.n * self.m) for _ in range(self.n)) * layers
        compute = max(24 * b * s_out * self.H**2 / (self.n * self.c) for _ in range(self.n)) * layers
        return scan + compute

    def prefill_tp(self, b, s_in, layers):
        share = b * s_in * self.H * self.B / (self.n * self.beta)
        return sum(self.a + share for _ in range(self.n - 1)) * 4 * layers

    def decode_tp(self, b, s_out, layers):
        share = b * self.H * self.B / (self.n * self.beta)
        return sum(self.a + share for _ in range(self.n - 1)) * 4 * s_out * layers

    def prefill_pp(self, b, s_in):
        return self.a + b * s_in * self.H * self.B / self.beta

    def decode_pp(self, b, s_out):
        return (self.a + b * self.H * self.B / self.beta) * s_out

    def memory(self, b, s, layers):
        weights = 12 * self.H**2 * self.B / self.n
        kv = 2 * b * s * self.H * self.B / self.n
        return (weights + kv) * layers + 4 * b * s * self.H * self.B


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["llama-2-70b", "opt-30b", "mixtral-8x7b"])
@pytest.mark.parametrize("card", ["H100", "A100-80GB", "L40"])
@pytest.mark.parametrize(
    ("isl", "osl", "b", "layers"), [(1024, 64, 1, 80), (300, 250, 7, 13), (2048, 1, 32, 1)]
)
def test_every_cell_of_the_table(card, model, n, isl, osl, b, layers):
    shape, device, link = find_model(model), CATALOGUE[card], Link(25e9, 12e-6)
    paper = Paper(shape.hidden, 2, n, device.flops_s, device.memory_bandwidth_bytes_s, link.latency_s, 25e9)
    costs, group = Table1(shape, fixed(isl, osl)), TensorGroup(device, n, link)

    prefill = layers * costs.layer_s("prefill", group, b) + costs.edge_s("prefill", group, b, True)
    whole = paper.prefill_computation(b, isl, layers) + paper.prefill_tp(b, isl, layers)
    assert prefill == pytest.approx(whole)
    # The paper counts decode over all s_out tokens, the cost models count one step.
    step = layers * costs.layer_s("decode", group, b) + costs.edge_s("decode", group, b, True)
    decode = paper.decode_computation(b, osl, layers) + paper.decode_tp(b, osl, layers)
    assert step * osl == pytest.approx(decode)

    assert costs.hop_s("prefill", link, b) == pytest.approx(paper.prefill_pp(b, isl))
    assert costs.hop_s("decode", link, b) * osl == pytest.approx(paper.decode_pp(b, osl))

    held = costs.stage_memory("decode", group, True, True)
    assert held.needed(layers, b) == pytest.approx(paper.memory(b, isl + osl, layers))
    assert held.limit == device.memory_bytes
    prompts = costs.stage_memory("prefill", group, True, True)
    assert prompts.needed(layers, b) == pytest.approx(paper.memory(b, isl, layers))


def test_numbers_worked_out_by_hand():
    """Llama-2 70B (H = 8192) on two cards of 100 TFLOP/s and 1 TB/s, 10 us and 100 GB/s between them."""
    costs = Table1(LLAMA_70B, fixed(1000, 100))
    pair = TensorGroup(Accelerator("card", 80 * GIB, 1e14, 1e12), 2, Link(1e11, 1e-5))
    # 24 * 1000 * 8192^2 / (2e14) = 8.0530637 ms; 4 * (10 us + 1000 * 8192 * 2 / (2e11)) = 0.36768 ms.
    assert costs.layer_s("prefill", pair, 1) == pytest.approx(8.05306368e-3 + 0.36768e-3)
    # Scan 12 * 8192^2 * 2 / 2e12 = 0.80530637 ms; compute 24 * 10 * 8192^2 / 2e14 = 0.08053064 ms;
    # 4 * (10 us + 10 * 8192 * 2 / 2e11) = 0.0432768 ms.
    assert costs.layer_s("decode", pair, 10) == pytest.approx(0.805306368e-3 + 0.0805306368e-3 + 0.0432768e-3)
    # 10 us + 1000 * 8192 * 2 / 1e11.
    assert costs.hop_s("prefill", pair.link, 1) == pytest.approx(173.84e-6)
    assert costs.hop_s("decode", pair.link, 1) == pytest.approx(10.16384e-6)
    # 80 layers: 80 * 805306368 weights, 80 * 1100 * 16384 of KV cache and 4 * 1100 * 16384 of activations.
    memory = costs.stage_memory("decode", pair, True, True)
    assert memory.needed(80, 1) == 80 * 805_306_368 + 80 * 18_022_400 + 72_089_600


def test_kv_transfer_of_a_layer_and_of_the_model():
    costs = Table1(LLAMA_70B, fixed(1024, 128))
    assert costs.kv_bytes_per_layer * LLAMA_70B.layers == 2 * 1024 * 8192 * 2 * 80
    # The paper assumes multi-head attention, whose cache is eight times that of 8 KV heads of 64.
    assert costs.kv_bytes_per_layer * LLAMA_70B.layers == 8 * 1024 * LLAMA_70B.kv_bytes_per_token


def test_prefill_gains_nothing_by_batching():
    costs, lone = Table1(LLAMA_70B, fixed(512, 128)), TensorGroup(CATALOGUE["A100-80GB"], 1, NO_LINK)
    assert costs.prefill_batch() == 1
    assert costs.layer_s("prefill", lone, 8) == pytest.approx(8 * costs.layer_s("prefill", lone, 1))


def test_it_reads_no_kv_cache():
    group = group_of("H100", 2)
    short, long = Table1(LLAMA_70B, fixed(100, 100)), Table1(LLAMA_70B, fixed(4000, 100))
    assert short.layer_s("decode", group, 32) == long.layer_s("decode", group, 32)
