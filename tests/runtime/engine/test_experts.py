"""What mixtures of experts compute beside products, by kernels of every build and by torch's operators."""

from __future__ import annotations

import pytest
import torch

from runtime import native
from runtime.engine.torch.experts import Routing

pytestmark = pytest.mark.usefixtures("each_build")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 64, 1001])
def test_clamped_gate(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    gate_up = (torch.randn(7, 2 * width) * 5).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=4), up.clamp(-4, 4)
    expected = gate * (1.7 * gate).sigmoid() * (up + 1)
    off = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.01, "atol": 1e-6}
    torch.testing.assert_close(native.clamped_gate(gate_up, 1.7, 4.0).double(), expected, **off)


BIAS = torch.linspace(-1, 1, 24)[torch.arange(24) * 7 % 24]
ROUTINGS = [
    Routing(3, renormalises=True),
    Routing(3, renormalises=False, factor=1.7),
    Routing(4, renormalises=False, groups=4, kept_groups=2),
    Routing(4, True, is_sigmoid=True, factor=2.5, groups=4, kept_groups=2, best=2, bias=BIAS),
    Routing(2, False, is_sigmoid=True, bias=BIAS, best=2),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=range(len(ROUTINGS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_chosen_as_by_torch(
    monkeypatch: pytest.MonkeyPatch, routing: Routing, dtype: torch.dtype
) -> None:
    """In any order; of many tokens and few. Experts of equal scores are no subject here."""
    torch.manual_seed(7)
    logits = torch.stack([torch.randperm(24) for _ in range(3000)]).to(dtype) / 4
    weights, numbers = routing(logits)
    few = routing(logits[:2])
    assert torch.equal(few[0], weights[:2]) and torch.equal(few[1], numbers[:2])
    monkeypatch.setattr(native, "serves", lambda dtype, device: False)
    expected, chosen = routing(logits)
    order, other = numbers.argsort(1), chosen.argsort(1)
    assert torch.equal(numbers.gather(1, order), chosen.gather(1, other))
    torch.testing.assert_close(weights.gather(1, order), expected.gather(1, other), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 700])
@pytest.mark.parametrize(("first", "held"), [(0, 6), (2, 3), (5, 1)])
def test_rows_of_experts(tokens: int, first: int, held: int, dtype: torch.dtype) -> None:
    """Sorted by expert, in the order of tokens; sums of those that are held, rounded once."""
    torch.manual_seed(tokens)
    x, weights = torch.randn(tokens, 37).to(dtype), torch.rand(tokens, 2)
    numbers = torch.stack([torch.randperm(6)[:2] for _ in range(tokens)])
    found = native.gather_experts(x, numbers, first, held)
    at = [(numbers == first + expert).nonzero()[:, 0] for expert in range(held)]
    assert found.counts.tolist() == [len(rows) for rows in at]
    assert torch.equal(found.rows[: sum(found.counts)], x[torch.cat(at)])
    sums = native.add_experts(found.rows * 2, found.places, weights)
    own = weights * ((numbers >= first) & (numbers < first + held))
    expected = 2 * x.double() * own.double().sum(1, keepdim=True)
    off = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.01, "atol": 1e-6}
    torch.testing.assert_close(sums.double(), expected, **off)
    assert torch.equal(native.add_experts(found.rows * 2, found.places[:1], weights[:1]), sums[:1])
