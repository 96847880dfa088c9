"""Quantised matrices: products for every build of the kernels that this processor runs, and parts of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from instructions import BUILDS
from quantised import FORMATS
from safetensors.torch import save_file

from cost_model.errors import InputError
from runtime import native
from runtime.engine.torch.linear import Linear
from runtime.engine.torch.loader import Checkpoint
from runtime.engine.torch.quantised.linear import Quantised
from runtime.engine.torch.quantised.packed import PackedWeight
from runtime.engine.torch.quantised.weight import Kind, QuantisedWeight, stacked

CPU = torch.device("cpu")
OUTPUTS, INPUTS = 88, 96
"""Of the matrix whose parts are read: whole words, but no whole panels, and groups that parts cut."""
ROUNDED_ONE = {"W8A8": 127 / 127.5, "W8A8, static": 33 * 0.03, "W8A8, static, zeros": 33 * 0.03}
"""What one becomes in formats that round activations."""


@pytest.fixture(params=[*BUILDS, "none"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A build of the kernels, or none."""
    if request.param == "none":
        monkeypatch.setattr(native, "serves", lambda dtype, device: False)
        return "none"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    native.library.loaded.cache_clear()
    request.addfinalizer(native.library.loaded.cache_clear)
    if not native.serves(torch.float32, CPU):
        pytest.skip("no compiled kernels")
    return request.param


def random_weight(
    kind: Kind, outputs: int, inputs: int, group: int, zeros: bool, scales: torch.dtype
) -> QuantisedWeight:
    """Any codes and scales; groups of inputs that follow each other."""
    count = -(-inputs // group)
    codes = torch.randint(0, 2**kind.bits, (outputs, inputs), dtype=torch.uint8)
    if kind == Kind.FP8:
        values = (torch.randn(outputs, inputs) * 100).clamp(-448, 448)  # older torch makes NaN of others
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantisedWeight(
        kind,
        codes,
        (torch.randn(outputs, count) * 0.01).to(scales),
        torch.randint(0, 2**kind.bits, (outputs, count), dtype=torch.uint8) if zeros else None,
        torch.arange(inputs) // group,
    )


def exact(weight: QuantisedWeight) -> torch.Tensor:
    """[out, in] in float64."""
    if weight.kind == Kind.FP8:
        codes = weight.codes.view(torch.float8_e4m3fn).double()
    else:
        zeros = 2 ** (weight.kind.bits - 1) if weight.zeros is None else weight.zeros[:, weight.groups]
        codes = weight.codes.double() - zeros
    return codes * weight.scales.double()[:, weight.groups]


KINDS = [(Kind.INT4, False), (Kind.INT4, True), (Kind.INT8, False), (Kind.INT8, True), (Kind.FP8, False)]


@pytest.mark.parametrize("scales", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(1, 1, 1), (33, 100, 100), (70, 600, 48)])
@pytest.mark.parametrize(("kind", "zeros"), KINDS)
def test_products(
    build: str, kind: Kind, zeros: bool, outputs: int, inputs: int, group: int, scales: torch.dtype
) -> None:
    torch.manual_seed(inputs)
    weight, bias = random_weight(kind, outputs, inputs, group, zeros, scales), torch.randn(outputs)
    packed, dense = PackedWeight(weight), exact(weight)
    torch.testing.assert_close(packed.dequantised(0, 9)[:outputs], dense.float(), rtol=1e-6, atol=0)
    plain, biased = Linear(packed), Linear(packed, bias)
    for rows in (0, 1, 3, 7, 13, 300):
        x = torch.randn(rows, inputs)
        expected = x.double() @ dense.T
        tolerance = {"rtol": 1e-4, "atol": 1e-5 * float(dense.abs().max()) * inputs}
        torch.testing.assert_close(plain(x).double(), expected, **tolerance)
        torch.testing.assert_close(biased(x).double(), expected + bias, **tolerance)
        if build != "none":
            alone = torch.cat([plain(row.unsqueeze(0)) for row in x]) if rows else plain(x)
            assert torch.equal(plain(x), alone), "a row's result depends on the others"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_16_bits_keep_their_type(build: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x = random_weight(Kind.INT4, 50, 128, 32, True, torch.float16), torch.randn(5, 128).to(dtype)
    found = Linear(PackedWeight(weight), torch.randn(50).to(dtype))(x)
    assert found.dtype == dtype
    found = Linear(PackedWeight(weight))(x)
    expected = x.double() @ exact(weight).T
    assert (found - expected).abs().max() < 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_every_float_of_8_bits() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127].unsqueeze(1)  # those are no numbers
    one = torch.ones(len(codes), 1)
    weight = QuantisedWeight(Kind.FP8, codes, one, None, torch.zeros(1, dtype=torch.int64))
    found = Linear(PackedWeight(weight))(torch.ones(1, 1))
    assert torch.equal(found[0], codes.view(torch.float8_e4m3fn).float().flatten())


def test_scales_that_panels_share_are_kept_once() -> None:
    weight = random_weight(Kind.FP8, 256, 256, 128, False, torch.float32)
    blocks = torch.rand(2, 2).repeat_interleave(128, dim=0)
    shared = QuantisedWeight(weight.kind, weight.codes, blocks, None, weight.groups)
    assert PackedWeight(shared).nbytes < 1.01 * 256 * 256 < 1.01 * PackedWeight(weight).nbytes


class Written:
    """A checkpoint of one quantised matrix `m` in each format."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(5)
        original = torch.randn(OUTPUTS, INPUTS)
        self._of: dict[str, tuple[Quantised, torch.Tensor]] = {}
        for name, (config, store) in FORMATS.items():
            parts, value = store(original)
            own = folder / str(len(self._of))
            own.mkdir(parents=True)
            tensors = {f"m.{suffix}": part.contiguous() for suffix, part in parts.items()}
            save_file(tensors, own / "model.safetensors")
            (own / "config.json").write_text(json.dumps({"quantization_config": config}))
            self._of[name] = Quantised(Checkpoint(str(own), "float32", CPU, ())), value

    def part(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> tuple[Linear, torch.Tensor]:
        """A part of the matrix, read and as it should be."""
        quantised, value = self._of[name]
        cuts = (OUTPUTS, *rows), (INPUTS, *columns)
        return quantised.linear([("m", cuts[0])], cuts[1], None), value[slice(*rows), slice(*columns)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("matrices"))


def spans(size: int) -> st.SearchStrategy[tuple[int, int]]:
    ends = st.tuples(st.integers(0, size), st.integers(0, size))
    return ends.map(sorted).filter(lambda span: span[0] < span[1]).map(tuple)


@given(st.sampled_from(list(FORMATS)), spans(OUTPUTS), spans(INPUTS))
def test_any_part_of_a_matrix(
    written: Written, name: str, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Parts that end inside words, groups and blocks, as ranks and heads may cut them."""
    part, expected = written.part(name, rows, columns)
    one_each = torch.eye(columns[1] - columns[0])
    expected = expected * ROUNDED_ONE.get(name, 1)
    torch.testing.assert_close(part(one_each).T, expected, rtol=1e-6, atol=1e-9)


@given(st.data(), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_stacked_parts_are_one_matrix(data: st.DataObject, sizes: list[int]) -> None:
    kind, zeros = data.draw(st.sampled_from(KINDS))
    parts = [random_weight(kind, size, 50, 16, zeros, torch.float16) for size in sizes]
    whole = PackedWeight(stacked(parts)).dequantised(0, 99)[: sum(sizes)]
    torch.testing.assert_close(whole, torch.cat([exact(part) for part in parts]).float(), rtol=1e-6, atol=0)
    padded = PackedWeight(parts[0].padded(60)).dequantised(0, 99)[:60]
    assert padded[sizes[0] :].eq(0).all()


def refused(folder: Path, name: str, change: Callable[[dict], None], **config: object) -> str:
    """What reading a matrix says after its tensors or its config were changed."""
    described, store = FORMATS[name]
    parts = dict(store(torch.randn(OUTPUTS, INPUTS))[0])
    change(parts)
    save_file(
        {f"m.{suffix}": part.contiguous() for suffix, part in parts.items()}, folder / "model.safetensors"
    )
    described = {key: value for key, value in {**described, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps({"quantization_config": described}))
    with pytest.raises(InputError) as caught:
        reader = Quantised(Checkpoint(str(folder), "float32", CPU, ()))
        assert reader.holds("m")
        reader.linear([("m", (OUTPUTS, 0, OUTPUTS))], (INPUTS, 0, INPUTS), None)
    assert "\n" not in str(caught.value) and caught.value.remedy
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("AWQ", {"quant_method": "bitsandbytes"}, ["quant_method", "bitsandbytes", "awq, gptq"]),
        ("AWQ", {"version": "gemv"}, ["quantization_config.version", "'gemv'", "gemm"]),
        ("AWQ", {"bits": 3}, ["quantization_config.bits", "4 bits"]),
        ("GPTQ 4 bits", {"bits": 2}, ["quantization_config.bits", "4 or 8 bits"]),
        ("GPTQ 4 bits", {"checkpoint_format": "marlin"}, ["checkpoint_format", "'marlin'", "gptq_v2"]),
        ("GPTQ 4 bits", {"group_size": 64}, ["model.safetensors", "m.qzeros", "shape", "match"]),
        ("GPTQ 4 bits", {"bits": 8}, ["model.safetensors", "m.qweight", "shape"]),
        ("Model Optimizer fp8", {"quant_algo": "NVFP4"}, ["nvfp4", "int4, int8, fp8"]),
        ("AWQ", {"quant_method": "mxfp4"}, ["mxfp4", "int4, int8, fp8"]),
    ],
)
def test_a_config_that_is_not_read_is_refused(
    tmp_path: Path, name: str, config: dict[str, object], words: list[str]
) -> None:
    said = refused(tmp_path, name, lambda parts: None, **config)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("GPTQ 4 bits", lambda parts: parts.pop("qzeros"), ["m.qzeros", "no such tensor"]),
        ("GPTQ 4 bits", lambda parts: parts["g_idx"].add_(5), ["m", "groups", "0 to 2"]),
        ("AWQ", lambda parts: parts.update(scales=parts["scales"].int()), ["m.scales", "I32"]),
        (
            "compressed-tensors int8",
            lambda parts: parts.update(weight=parts["weight"].float().to(torch.float8_e4m3fn)),
            ["m.weight", "F8_E4M3", "I8"],
        ),
        (
            "fp8 by blocks",
            lambda parts: parts.update(weight_scale_inv=torch.ones(9, 9)),
            ["m.weight_scale_inv", "(9, 9)", "(6, 3)"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, change: Callable[[dict], None], words: list[str]
) -> None:
    said = refused(tmp_path, name, change)
    assert all(word in said for word in words), said
