"""Linear layers of quantised checkpoints: the parts of one or more matrices, packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cost_model.config import formats_beside
from cost_model.errors import InputError
from cost_model.quantization import WeightScheme, weight_scheme
from runtime import native
from runtime.engine.torch.linear import Linear, Product, SideBySide
from runtime.engine.torch.loader import Checkpoint, Cut
from runtime.engine.torch.quantised.activations import Agree
from runtime.engine.torch.quantised.formats import FORMATS
from runtime.engine.torch.quantised.integers import IntegerProduct, IntegerWeight, rounding
from runtime.engine.torch.quantised.packed import PackedWeight
from runtime.engine.torch.quantised.part import Part, is_quantised
from runtime.engine.torch.quantised.rounded import RoundedWeight
from runtime.engine.torch.quantised.weight import QuantisedWeight, stacked
from runtime.options import TORCH_QUANTISED

_KEY = "quantization_config"
_LAYOUTS = {
    "awq": ("version", ("gemm",)),
    "gptq": ("checkpoint_format", ("gptq", "gptq_v2")),
}
"""By method: the key that names a layout of the tensors, and those that are read, the default first."""


class Quantised:
    """Reads the quantised matrices of a checkpoint, and packs them.

    Parameters
    ----------
    own_formats : methods that the model's family reads by itself, and then no others

    Raises
    ------
    InputError : the method, its layout or the format of the weights is unknown
    """

    def __init__(self, checkpoint: Checkpoint, own_formats: Sequence[str] = ()) -> None:
        self._checkpoint = checkpoint
        self._scheme = _supported_scheme(checkpoint, own_formats)

    def holds(self, *names: str) -> bool:
        """Whether one of these matrices is quantised."""
        return self._scheme is not None and any(is_quantised(self._checkpoint, name) for name in names)

    def linear(
        self,
        parts: Sequence[tuple[str, Cut]],
        columns: Cut,
        bias: torch.Tensor | None,
        outputs: int = 0,
        agree: Agree | None = None,
    ) -> Linear:
        """Parts of matrices with the same inputs, their outputs one after the other.

        Parameters
        ----------
        parts : names of matrices, some of which may be plain, and which outputs of each
        columns : which inputs
        bias : [outputs of all parts]
        outputs : of a single part, pad with outputs that are zero up to this number
        agree : where other ranks have the other inputs: finds the ranges of whole rows of inputs
        """
        read = [self._read(Part(self._checkpoint, name, rows, columns)) for name, rows in parts]
        products, first = list[Linear](), 0
        for weight in _merged(read):
            if isinstance(weight, QuantisedWeight):
                size = len(weight.codes)
                added = None if bias is None else bias[first : first + size]
                whole, dtype = weight.padded(outputs) if outputs else weight, self._checkpoint.dtype
                product, held = _product(whole, added, dtype, agree)
                self._checkpoint.bytes_read += held
                products.append(Linear(product))
            else:
                size = len(weight)
                added = None if bias is None else bias[first : first + size]
                products.append(Linear(weight, added, self._checkpoint.dtype))
            first += size
        return products[0] if len(products) == 1 else SideBySide(products)

    def plain(self, name: str, rows: Cut, columns: Cut) -> torch.Tensor:
        """A part of a matrix, quantised or not, in the type that the engine computes in: for what is no
        product with the matrix itself."""
        weight = self._read(Part(self._checkpoint, name, rows, columns))
        value = weight.value() if isinstance(weight, QuantisedWeight) else weight
        return value.to(self._checkpoint.dtype)

    def _read(self, part: Part) -> QuantisedWeight | torch.Tensor:
        if self._scheme is not None and is_quantised(self._checkpoint, part.name):
            return FORMATS[self._scheme.method](part, self._scheme)
        name = f"{part.name}.weight"
        kept = self._checkpoint.kept(name)
        return self._checkpoint.read(name, part.shape, part.rows[1:], part.columns[1:], kept)


def _product(
    weight: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype, agree: Agree | None
) -> tuple[Product, int]:
    """x [n, in] of a type -> x @ weight^T + bias [n, out], and the bytes that it holds."""
    activations = rounding(weight)
    if activations is not None and native.serves(torch.float32, weight.codes.device):
        integers = IntegerWeight(weight, activations)
        return IntegerProduct(integers, bias, agree), integers.nbytes
    if activations is None and dtype.itemsize == 2 and RoundedWeight.serves(weight):
        rounded = RoundedWeight(weight)
        return rounded.product(bias), rounded.nbytes
    packed = PackedWeight(weight)
    product = packed.product(bias)
    if activations is None:
        return product, packed.nbytes
    return lambda x: product(activations.rounded(x.float(), agree)).to(x.dtype), packed.nbytes


def _merged(
    parts: Sequence[QuantisedWeight | torch.Tensor],
) -> Iterator[QuantisedWeight | torch.Tensor]:
    """The parts, with neighbours stacked where they can be one matrix."""
    run = list[QuantisedWeight]()
    for part in parts:
        if run and not (isinstance(part, QuantisedWeight) and part.stacks_on(run[-1])):
            yield stacked(run)
            run = []
        if isinstance(part, QuantisedWeight):
            run.append(part)
        else:
            yield part
    if run:
        yield stacked(run)


def _supported_scheme(checkpoint: Checkpoint, own_formats: Sequence[str]) -> WeightScheme | None:
    """How a checkpoint's matrices are stored; None: it is not quantised, or in a format of its family's."""
    config = checkpoint.config
    found = config.get(_KEY), config.source, _KEY
    if found[0] is None:
        beside = formats_beside(checkpoint.folder)
        if beside is None:
            return None
        found = beside
    raw, source, key = found
    scheme, remedy = weight_scheme(raw, source, key), "choose another checkpoint of the model"
    if scheme.method in own_formats:
        return None
    if own_formats or scheme.method not in FORMATS or scheme.weight_type not in TORCH_QUANTISED:
        runs = ", ".join(own_formats or TORCH_QUANTISED)
        raise InputError(source, key, f"has {scheme.weight_type} weights, the engine runs {runs}", remedy)
    if scheme.method in _LAYOUTS:
        named, known = _LAYOUTS[scheme.method]
        layout = raw.get(named) or known[0]
        if str(layout).lower() not in known:
            problem = f"is {str(layout)[:60]!r}, the engine reads {', '.join(known)}"
            raise InputError(source, f"{key}.{named}", problem, remedy)
    return scheme
