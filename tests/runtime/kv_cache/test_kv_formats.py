"""Formats of KV caches in 8 bits: how exact they are, and how many bytes they take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_model.dtypes import in_formats
from cost_model.errors import InputError
from cost_model.models import find_model
from runtime.kv_cache.formats import KV_FORMATS, kv_format
from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import CacheShape, PagedCache

PACKED = [name for name, each in KV_FORMATS.items() if each.is_packed]
numbers = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
vectors = st.lists(numbers, min_size=1, max_size=80).map(torch.tensor)


@given(vectors)
def test_int8_is_off_by_half_a_step_at_most(values: torch.Tensor) -> None:
    found = kv_format("int8").unpack(kv_format("int8").pack(values), torch.float32)
    step = values.abs().max().double() / 127
    assert ((found.double() - values.double()).abs() <= 0.5001 * step + 1e-44).all()


@given(vectors)
def test_fp8_is_off_by_a_sixteenth_at_most_up_to_448(values: torch.Tensor) -> None:
    found = kv_format("fp8").unpack(kv_format("fp8").pack(values), torch.float32)
    limited = values.clamp(-448, 448)
    assert ((found - limited).abs() <= limited.abs() / 16 + 2**-10).all()


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_packed_stays_the_same_when_it_is_packed_again(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    form, values = kv_format(name), torch.randn(5, 3, 16).to(dtype)
    packed = form.pack(values)
    assert packed.shape == (5, 3, form.width(16)) and packed.dtype == torch.uint8
    found = form.unpack(packed, torch.float32)
    torch.testing.assert_close(form.unpack(form.pack(found), torch.float32), found)
    assert torch.equal(form.unpack(packed, dtype), found.to(dtype))


@pytest.mark.parametrize("name", PACKED)
def test_zeros_stay_zero_and_nan_does_not_become_a_number(name: str) -> None:
    form = kv_format(name)
    assert not form.unpack(form.pack(torch.zeros(4, 16)), torch.float32).any()
    broken = torch.ones(16)
    broken[3] = torch.nan
    assert form.unpack(form.pack(broken), torch.float32)[3].isnan()


@pytest.mark.parametrize("model", ["llama-2-70b", "deepseek-v3"])
@pytest.mark.parametrize("name", PACKED)
def test_a_pool_takes_the_bytes_that_the_cost_model_counts(name: str, model: str) -> None:
    shape, sizes = in_formats(find_model(model), kv=name), find_model(model)
    part = Part(0, 2, 0, sizes.kv_heads)
    sides = 2 if sizes.latent is None else 1
    device = torch.device("cpu")
    held = CacheShape(part, sizes.kv_head_dim, torch.float32, device, format=kv_format(name), sides=sides)
    assert PagedCache(held, 3, 4).pool.nbytes == 12 * 2 * shape.kv_bytes_per_token_layer


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError, match="--kv-cache-dtype: is 'fp7'; use one of plain, fp8, int8"):
        kv_format("fp7")
