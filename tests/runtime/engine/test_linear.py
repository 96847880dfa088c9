"""Products with packed weights, and with plain ones where packing does not work."""

from __future__ import annotations

import pytest
import torch
from instructions import BUILDS

from runtime import native
from runtime.engine.torch import linear
from runtime.engine.torch.linear import Linear, Rows

ROWS = (0, 1, 2, 7, 33)
EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("packing", ["native", "oneDNN", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "width"), [(1, 1), (3, 5), (251, 64), (64, 251), (0, 16), (768, 96)])
def test_products_are_those_of_exact_arithmetic(
    monkeypatch: pytest.MonkeyPatch, packing: str, dtype: torch.dtype, size: int, width: int
) -> None:
    """Within the error bound of float32 summation in any order (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, section 3.1), followed by rounding to the type."""
    monkeypatch.setattr(linear, "_SMALL", 0)
    if packing != "native":
        monkeypatch.setattr(native, "serves", lambda dtype, device: False)
    if packing == "none":
        monkeypatch.setattr(linear, "onednn_works", lambda dtype: False)
    generator = torch.Generator().manual_seed(size + width)
    weight = torch.randn(size, width, generator=generator).to(dtype)
    bias = torch.randn(size, generator=generator).to(dtype)
    with torch.inference_mode():
        plain, biased = Linear(weight), Linear(weight, bias)
        for rows in ROWS:
            x = torch.randn(rows, 2 * width, generator=generator).to(dtype)[:, :width]
            exact = x.double() @ weight.double().T
            size_of_terms = x.double().abs() @ weight.double().abs().T
            for answer, expected in ((plain(x), exact), (biased(x), exact + bias.double())):
                error = (answer.double() - expected).abs()
                allowed = (width + 1) * EPS * (size_of_terms + expected.abs())
                assert answer.dtype == dtype
                assert error.le(allowed + torch.finfo(dtype).eps * expected.abs()).all()


@pytest.fixture(params=[*BUILDS, "none"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of the kernels, or none."""
    if request.param == "none":
        monkeypatch.setattr(native, "serves", lambda dtype, device: False)
        monkeypatch.setattr(native, "multiplies", lambda dtype, device: False)
        return
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    native.library.loaded.cache_clear()
    request.addfinalizer(native.library.loaded.cache_clear)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "width"), [(1, 1), (33, 5), (251, 64), (64, 251)])
def test_weights_in_16_bits_multiply_x_in_float32_as_if_they_were_in_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int, width: int
) -> None:
    monkeypatch.setattr(linear, "_SLICE_VALUES", 7 * width)
    monkeypatch.setattr(linear, "onednn_works", lambda dtype: False)
    torch.manual_seed(size)
    scales = torch.tensor([1e-7, 1e-3, 1.0, 1e4])[torch.arange(size) % 4].unsqueeze(1)  # the first, subnormal
    weight, bias = (torch.randn(size, width) * scales).to(dtype), torch.randn(size)
    halves, whole = Linear(weight, bias, torch.float32), Linear(weight.float(), bias)
    rows = Rows(size, width, lambda *shape: torch.empty(shape, dtype=dtype), torch.float32)
    rows.put(0, weight)
    for count in ROWS:
        x = torch.randn(count, width)
        expected = whole(x)
        assert expected.dtype == torch.float32
        if native.multiplies(torch.float32, x.device):
            assert torch.equal(halves(x), expected)
        torch.testing.assert_close(halves(x), expected, rtol=1e-5, atol=1e-5 * float(weight.abs().max()))
        assert torch.equal(rows.linear(bias)(x), halves(x))


def test_a_weight_is_copied_when_packed() -> None:
    weight = torch.ones(512, 256)
    if not native.serves(weight.dtype, weight.device) and not linear.onednn_works(torch.float32):
        pytest.skip("neither compiled kernels nor a torch with packed products")
    product = Linear(weight)
    weight.zero_()
    assert product(torch.ones(1, 256)).eq(256).all()
