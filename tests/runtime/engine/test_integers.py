"""Products of integers on both sides (W8A8), for every build of the kernels that this processor runs, against
exact sums of the codes that compressed-tensors rounds to."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from instructions import BUILDS
from quantised import without_lowest_code

from runtime import native
from runtime.engine.torch.experts import GroupedLinear
from runtime.engine.torch.quantised.activations import Activations
from runtime.engine.torch.quantised.integers import IntegerProduct, IntegerWeight, rounding
from runtime.engine.torch.quantised.packed import PackedWeight
from runtime.engine.torch.quantised.weight import Kind, QuantisedWeight

CPU = torch.device("cpu")
DYNAMIC = [Activations(symmetric=True), Activations(symmetric=False)]
STATIC = [Activations(True, torch.tensor([0.03, 0.0])), Activations(False, torch.tensor([0.03, -20.0]))]


@pytest.fixture(params=[(build, dots) for build in BUILDS for dots in (True, False)], ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of the kernels, with instructions for products of bytes if there are any, and without."""
    build, dots = request.param
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: build)
    native.library.loaded.cache_clear()
    request.addfinalizer(native.library.loaded.cache_clear)
    if not native.serves(torch.float32, CPU):
        pytest.skip("no compiled kernels")
    if not dots:
        monkeypatch.setattr(native.library, "multiplies_bytes", lambda: 0)
    elif not native.library.multiplies_bytes():
        pytest.skip("no instructions for products of bytes")


def matrix(outputs: int, inputs: int, zeros: bool, activations: Activations) -> QuantisedWeight:
    """Any codes."""
    return QuantisedWeight(
        Kind.INT8,
        torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8),
        torch.rand(outputs, 1) * 0.01,
        torch.randint(0, 256, (outputs, 1), dtype=torch.uint8) if zeros else None,
        torch.zeros(inputs, dtype=torch.int64),
        activations,
    )


def rounded_by_the_library(
    x: torch.Tensor, activations: Activations
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The codes of x, their scales and their zeros, by compressed-tensors."""
    static = activations.steps is not None
    args = QuantizationArgs(
        num_bits=8,
        strategy="tensor" if static else "token",
        symmetric=activations.symmetric,
        dynamic=not static,
    )
    if activations.steps is not None:
        scales, zeros = activations.steps.view(2, 1)
    else:
        scales, zeros = compute_dynamic_scales_and_zp(x.unsqueeze(0), args, torch.nn.Module())
        scales, zeros = scales[0], zeros[0]
    with without_lowest_code():
        return quantize(x, scales, zeros, args), scales, zeros


def exact(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor, activations: Activations
) -> torch.Tensor:
    """By sums of 64 bits, rounded to float32 once."""
    codes, scales, zeros = rounded_by_the_library(x, activations)
    middle = 128 if weight.zeros is None else weight.zeros.long()
    sums = (codes.long() - zeros.long()) @ (weight.codes.long() - middle).T
    return (sums.double() * (scales.double() * weight.scales.double().T) + bias.double()).float()


@pytest.mark.parametrize("activations", DYNAMIC + STATIC)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 103), (70, 600)])
@pytest.mark.usefixtures("kernels")
def test_products_are_exact(outputs: int, inputs: int, zeros: bool, activations: Activations) -> None:
    torch.manual_seed(inputs)
    weight, bias = matrix(outputs, inputs, zeros, activations), torch.randn(outputs)
    product = IntegerProduct(IntegerWeight(weight, activations), bias)
    for rows in (0, 1, 3, 7, 13, 60, 150):
        x = torch.randn(rows, inputs) * torch.rand(rows, 1) * 10
        x[: rows // 5] = 0
        expected = exact(x, weight, bias, activations) if rows else x.new_empty(0, outputs)
        assert torch.equal(product(x), expected)


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (3, 0, 1, 40), (0, 1, 0, 0)])
@pytest.mark.usefixtures("kernels")
def test_groups_of_rows_are_as_exact_as_single_products(counts: tuple[int, ...]) -> None:
    """Each with a matrix of its own, which rounds in its own way; some have zeros, or a bias."""
    torch.manual_seed(sum(counts))
    products, expected, parts = [], [], []
    for number, (count, activations) in enumerate(zip(counts, DYNAMIC + STATIC, strict=True)):
        weight, bias = matrix(70, 103, number < 2, activations), torch.randn(70) * (number != 2)
        added = None if number == 2 else bias
        products.append(IntegerProduct(IntegerWeight(weight, activations), added))
        parts.append(torch.randn(count, 103) * (1 + torch.arange(count)[:, None]))
        if count:
            expected.append(exact(parts[-1], weight, bias, activations))
    found = IntegerProduct.grouped(products)(torch.cat(parts), counts)
    assert torch.equal(found, torch.cat(expected) if expected else found.new_empty(0, 70))


@pytest.mark.usefixtures("kernels")
def test_ranks_that_divide_experts_agree_once_for_all() -> None:
    torch.manual_seed(3)
    x, calls, counts = torch.randn(5, 64), list[torch.Tensor](), (2, 0, 3)

    def agree(ranges: torch.Tensor) -> torch.Tensor:
        calls.append(ranges)
        return ranges * 2

    weights = [matrix(40, 64, False, DYNAMIC[0]) for _ in counts]
    apart = [IntegerProduct(IntegerWeight(each, DYNAMIC[0]), None, agree) for each in weights]
    found, (ranges,) = GroupedLinear(apart)(x, counts), calls
    assert torch.equal(ranges, torch.stack((-x.amin(1), x.amax(1)), dim=1))
    parts = zip(apart, x.split(list(counts)), strict=True)
    assert torch.equal(found, torch.cat([product(part) for product, part in parts if len(part)]))


@pytest.mark.parametrize("code", [0, 255])
@pytest.mark.usefixtures("kernels")
def test_the_largest_sums(code: int) -> None:
    """Of the widest matrix, with the codes that are furthest from zero on both sides."""
    inputs, activations = native.LARGEST_INPUTS, Activations(True, torch.tensor([1.0, 0.0]))
    weight = matrix(3, inputs, True, activations)
    weight.codes.fill_(code)
    weight.scales.fill_(1)
    x = torch.tensor([[-200.0], [200.0]]).expand(2, inputs)
    expected = exact(x, weight, torch.zeros(3), activations)
    assert torch.equal(IntegerProduct(IntegerWeight(weight, activations))(x), expected)


@pytest.mark.usefixtures("kernels")
def test_infinity_and_what_is_no_number_stay_visible() -> None:
    weight = matrix(40, 100, False, DYNAMIC[0])
    for spoilt in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(2, 100)
        x[1, 37] = spoilt
        found = IntegerProduct(IntegerWeight(weight, DYNAMIC[0]))(x)
        assert found[0].isfinite().all() and not found[1].isfinite().any()


@pytest.mark.parametrize("activations", DYNAMIC)
@pytest.mark.parametrize("by", ["kernels", "torch"])
def test_parts_that_agree_on_ranges_add_up_to_the_whole(
    by: str, activations: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks compute that divide the inputs: codes are those of whole rows."""
    torch.manual_seed(7)
    weight, x = matrix(50, 200, True, activations), torch.randn(9, 200)
    codes, scales, zeros = rounded_by_the_library(x, activations)
    if by == "torch":
        monkeypatch.setattr(native, "serves", lambda dtype, device: False)
    whole = torch.stack((-x.amin(1), x.amax(1)), dim=1)
    for first, end in ((0, 70), (70, 200)):
        own = x[:, first:end]

        def agree(ranges: torch.Tensor, own: torch.Tensor = own) -> torch.Tensor:
            assert torch.equal(ranges, torch.stack((-own.amin(1), own.amax(1)), dim=1))
            return whole

        stood_for = (codes[:, first:end] - zeros) * scales
        assert torch.equal(activations.rounded(own, agree), stood_for)
        if by == "kernels":
            assert weight.zeros is not None
            part = QuantisedWeight(
                Kind.INT8, weight.codes[:, first:end], weight.scales, weight.zeros, weight.groups[first:end]
            )
            found = IntegerProduct(IntegerWeight(part, activations), None, agree)(own)
            torch.testing.assert_close(found, stood_for @ part.value().T)


def test_a_matrix_with_groups_of_inputs_is_multiplied_by_its_weights_alone() -> None:
    weight = matrix(8, 32, False, DYNAMIC[0])
    assert rounding(weight) is DYNAMIC[0]
    grouped = QuantisedWeight(
        Kind.INT8, weight.codes, weight.scales.expand(8, 2), None, torch.arange(32) // 16, DYNAMIC[0]
    )
    assert rounding(grouped) is None


@pytest.mark.parametrize("zeros", [False, True])
def test_bytes(zeros: bool) -> None:
    """A byte for each weight: no more than with activations that are not rounded."""
    weight = matrix(512, 512, zeros, DYNAMIC[0])
    assert IntegerWeight(weight, DYNAMIC[0]).nbytes <= PackedWeight(weight).nbytes
