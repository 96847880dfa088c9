"""Products with packed weights, and with plain ones where packing doesn't work."""

from __future__ import annotations

import pytest
import torch

from runtime.engine import linear
from runtime.engine.linear import Linear

ROWS = (0, 1, 2, 7, 33)
EPS = torch.finfo(torch.float32).eps  # sums are made in float32, whatever the type


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "width"), [(1, 1), (3, 5), (251, 64), (64, 251), (0, 16), (768, 96)])
def test_products_are_those_of_exact_arithmetic(
    monkeypatch: pytest.MonkeyPatch, packing: bool, dtype: torch.dtype, size: int, width: int
) -> None:
    if not packing:
        monkeypatch.setattr(linear, "_packing_works", lambda dtype: False)
    generator = torch.Generator().manual_seed(size + width)
    weight = torch.randn(size, width, generator=generator).to(dtype)
    bias = torch.randn(size, generator=generator).to(dtype)
    with torch.inference_mode():
        plain, biased = Linear(weight), Linear(weight, bias)
        for rows in ROWS:
            x = torch.randn(rows, 2 * width, generator=generator).to(dtype)[:, :width]
            exact = x.double() @ weight.double().T
            for answer, expected in ((plain(x), exact), (biased(x), exact + bias.double())):
                assert answer.dtype == dtype
                torch.testing.assert_close(
                    answer, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=width * EPS
                )


def test_a_weight_is_copied_when_packed() -> None:
    weight = torch.ones(16, 16)
    product = Linear(weight)
    if not linear._packing_works(torch.float32):
        pytest.skip("this build of torch has no packed products")
    weight.zero_()
    assert product(torch.ones(1, 16)).eq(16).all()
