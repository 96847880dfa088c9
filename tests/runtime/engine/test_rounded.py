"""Products of weights of 4 and 8 bits with inputs that are rounded to 16 bits, for builds that round them."""

from __future__ import annotations

import math

import pytest
import torch
from instructions import BUILDS

from runtime import native
from runtime.engine.torch.quantised.packed import PackedWeight, runs_of
from runtime.engine.torch.quantised.rounded import RoundedWeight
from runtime.engine.torch.quantised.weight import Kind, QuantisedWeight

CODES = 32767
"""Of the largest input of a run."""
KINDS = [(Kind.INT4, False), (Kind.INT4, True), (Kind.INT8, False), (Kind.INT8, True)]


@pytest.fixture(params=BUILDS, autouse=True)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of the kernels."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    native.library.loaded.cache_clear()
    request.addfinalizer(native.library.loaded.cache_clear)
    if not native.multiplies_words():
        pytest.skip("floats are as fast here")


def random_weight(kind: Kind, outputs: int, groups: torch.Tensor, zeros: bool) -> QuantisedWeight:
    """Any codes and scales, with a group for each input."""
    count, end = int(groups.max()) + 1, 2**kind.bits
    return QuantisedWeight(
        kind,
        torch.randint(0, end, (outputs, len(groups)), dtype=torch.uint8),
        torch.randn(outputs, count).to(torch.float16),
        torch.randint(0, end, (outputs, count), dtype=torch.uint8) if zeros else None,
        groups,
    )


def limits(weight: QuantisedWeight, x: torch.Tensor) -> torch.Tensor:
    """How far products may be off [n, out]: each input by half of what a code is worth in its run."""
    groups, order = weight.groups.sort(stable=True)
    value = weight.value().double().abs()[:, order]
    off = torch.zeros(len(x), len(value), dtype=torch.float64)
    for first, end, _ in runs_of(groups).tolist():
        largest = x[:, order][:, first:end].abs().amax(1, keepdim=True)
        off += 0.51 * largest / CODES @ value[:, first:end].sum(1, keepdim=True).T
    return off


@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(1, 8, 8), (33, 100, 100), (70, 600, 48), (64, 1024, 1024)]
)
@pytest.mark.parametrize(("kind", "zeros"), KINDS)
def test_products_are_off_by_half_a_code_at_most(
    kind: Kind, zeros: bool, outputs: int, inputs: int, group: int
) -> None:
    torch.manual_seed(inputs)
    weight, bias = random_weight(kind, outputs, torch.arange(inputs) // group, zeros), torch.randn(outputs)
    assert RoundedWeight.serves(weight)
    rounded, exact = RoundedWeight(weight), weight.value().double()
    for rows in (0, 1, 2, 3, 7, 12, 13, 300):
        x = torch.randn(rows, inputs) * torch.rand(rows, 1) ** 20
        found = rounded.product(bias)(x).double() - bias
        summed = 1e-6 * (x.double().abs() @ exact.abs().T + bias.abs())  # in float32
        assert ((found - x.double() @ exact.T).abs() <= limits(weight, x.double()) + summed).all()
        alone = [rounded.product(bias)(row.unsqueeze(0)) for row in x]
        assert not rows or torch.equal(rounded.product(bias)(x), torch.cat(alone)), "a row depends on others"


@pytest.mark.parametrize(("kind", "zeros"), KINDS)
def test_inputs_that_are_codes_are_multiplied_exactly(kind: Kind, zeros: bool) -> None:
    """At the ends of what fits: sums of 32 bits never overflow."""
    weight = random_weight(kind, 40, torch.arange(512) // 256, zeros)
    for extreme in (0, 2**kind.bits - 1):
        codes = torch.full_like(weight.codes, extreme)
        ends = None if weight.zeros is None else torch.full_like(weight.zeros, 2**kind.bits - 1 - extreme)
        ones = torch.ones_like(weight.scales)
        whole = QuantisedWeight(kind, codes, ones, ends, weight.groups)
        for sign in (1, -1):
            x = torch.full((3, 512), float(sign * CODES))
            x[1, ::2] = 5
            found = RoundedWeight(whole).product(None)(x)
            torch.testing.assert_close(
                found.double(), x.double() @ whole.value().double().T, rtol=1e-6, atol=0
            )


def test_inputs_in_the_order_of_their_groups() -> None:
    groups = torch.arange(128) // 32
    weight = random_weight(Kind.INT4, 50, groups[torch.randperm(128)], True)
    x = torch.randn(5, 128).to(torch.bfloat16)
    found, packed = (kind(weight).product(None)(x) for kind in (RoundedWeight, PackedWeight))
    assert found.dtype == torch.bfloat16
    exact = x.double() @ weight.value().double().T
    off, theirs = ((each.double() - exact).abs().mean() for each in (found, packed))
    assert off < 1.01 * theirs


def test_groups_that_divide_words_are_left_to_floats() -> None:
    for kind, inputs in ((Kind.INT4, 8), (Kind.INT8, 4)):
        for group in (1, inputs - 1, inputs + 1, inputs):
            weight = random_weight(kind, 3, torch.arange(3 * inputs) // group, False)
            assert RoundedWeight.serves(weight) == (group == inputs)
    fp8 = QuantisedWeight(Kind.FP8, weight.codes, weight.scales, None, weight.groups)
    assert not RoundedWeight.serves(fp8)


def test_what_is_no_number_spoils_its_own_row_alone() -> None:
    weight = random_weight(Kind.INT8, 40, torch.arange(64) // 32, False)
    x = torch.randn(4, 64)
    x[1, 40], x[2, 3], x[3] = math.nan, -math.inf, 0
    found = RoundedWeight(weight).product(None)(x)
    assert found[0].isfinite().all() and found[1:3].isnan().all() and not found[3].any()
    tiny = RoundedWeight(weight).product(None)(torch.full((1, 64), 1e-38))
    assert tiny.abs().max() < 1e-30


def test_as_many_bytes_as_with_floats() -> None:
    for kind, zeros in KINDS:
        weight = random_weight(kind, 256, torch.arange(1024) // 32, zeros)
        assert RoundedWeight(weight).nbytes == PackedWeight(weight).nbytes
