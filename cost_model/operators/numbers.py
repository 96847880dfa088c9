"""The numbers that formulas of operators are fitted with, and the file that ships them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cost_model.fields import Name, Prose, between, schema_error
from cost_model.files import read_text

_SHIPPED = Path(__file__).parent / "fitted.json"
_MAX_BYTES = 1 << 20

Error = Annotated[float, Field(ge=0, allow_inf_nan=False), between(0, 1e9)]
Rows = Annotated[int, Field(ge=0), between(0, 10**9)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _number(start: float, least: float, most: float) -> Any:
    """A number that fits start at, and the range they stay in."""
    return Field(default=start, ge=least, le=most, allow_inf_nan=False)


class GemmNumbers(_Strict):
    """Numbers of cost_model/operators/gemm.py.

    launch_us : microseconds of the smallest product
    compute, memory : shares of the peaks that large products reach
    overlap : how far computing and reading hide each other (arithmetic.overlapped_s)
    stepped : how far the last wave of tiles counts as a whole one (arithmetic.waves)
    small_tile : speed that is left when a tile is halved
    fill : elements of k that filling a unit's pipeline takes as long as
    row_ns : nanoseconds to quantise one row of activations (0 where they are not quantised)
    host_us : microseconds for which the host is busy to start one, outside CUDA graphs (0: not measured)
    """

    launch_us: float = _number(3.0, 0.1, 30.0)
    compute: float = _number(0.7, 0.05, 1.2)
    memory: float = _number(0.8, 0.05, 1.2)
    overlap: float = _number(0.8, 0.001, 1.0)
    stepped: float = _number(0.3, 0.001, 1.0)
    small_tile: float = _number(0.8, 0.4, 1.0)
    fill: float = _number(100.0, 1.0, 4000.0)
    row_ns: float = _number(0.0, 0.0, 50.0)
    host_us: float = _number(0.0, 0.0, 1000.0)


class PrefillNumbers(_Strict):
    """Numbers of attention over prompts (cost_model/operators/attention.py).

    launch_us, compute, memory : as in GemmNumbers
    narrow : elements by which heads of few elements are slower than wide ones
    diagonal : keys that each query tile computes beyond the mask
    tile_us : fixed microseconds of a tile of queries
    stored : how many times as long a byte of keys and values takes as one of queries: they are written to
        the cache, converted, and read by several tiles
    stepped : as in GemmNumbers
    """

    launch_us: float = _number(10.0, 0.1, 40.0)
    compute: float = _number(0.6, 0.05, 1.0)
    memory: float = _number(0.5, 0.02, 1.2)
    narrow: float = _number(10.0, 0.1, 300.0)
    diagonal: float = _number(60.0, 0.1, 1000.0)
    tile_us: float = _number(0.2, 0.001, 20.0)
    stored: float = _number(2.0, 0.1, 50.0)
    stepped: float = _number(0.5, 0.001, 1.0)


class DecodeNumbers(_Strict):
    """Numbers of attention of decodes over their KV caches (cost_model/operators/attention.py).

    launch_us, compute, memory, overlap, stepped : as in GemmNumbers
    few : of a wave, how many requests and KV heads suffice to read at half of the speed
    tile_us : fixed microseconds of one request and KV head
    """

    launch_us: float = _number(10.0, 0.1, 40.0)
    compute: float = _number(0.3, 0.005, 1.2)
    memory: float = _number(0.8, 0.05, 1.2)
    overlap: float = _number(0.8, 0.001, 1.0)
    few: float = _number(0.003, 1e-6, 1.0)
    tile_us: float = _number(1.0, 0.001, 20.0)
    stepped: float = _number(0.5, 0.001, 1.0)


class MlaNumbers(_Strict):
    """Numbers of a whole MLA module (cost_model/operators/mla.py).

    launch_us : microseconds of its kernels at the smallest size
    projections, attention : shares of the peaks that products with weights, and over the cache, reach
    memory, overlap : as in GemmNumbers
    few : of a wave of requests and heads, how many suffice to read the cache at half of the speed
    request_us : microseconds of each request: of its attention in decode, of 128 heads' in prefill
    tile : tokens, and keys, by which sizes are rounded up on average
    """

    launch_us: float = _number(60.0, 1.0, 400.0)
    projections: float = _number(0.5, 0.02, 1.2)
    attention: float = _number(0.4, 0.01, 1.2)
    memory: float = _number(0.6, 0.02, 1.2)
    overlap: float = _number(0.8, 0.001, 1.0)
    few: float = _number(0.05, 1e-6, 10.0)
    request_us: float = _number(0.05, 1e-4, 20.0)
    tile: float = _number(32.0, 1.0, 256.0)


class ExpertNumbers(_Strict):
    """Numbers of a mixture-of-experts layer (cost_model/operators/experts.py).

    launch_us, compute, memory, overlap : as in GemmNumbers
    pad : rows by which each expert's share of the tokens is rounded up on average
    narrow : elements by which narrow experts are slower than wide ones
    row_ns : nanoseconds to sort one pair of a token and an expert
    spread : 0 where a batch reaches as few experts as skewed routing does, 1 where as many as random routing
    skew : how many more pairs the busiest of many ranks gets under skewed routing, relative to the mean
    """

    launch_us: float = _number(20.0, 1.0, 200.0)
    compute: float = _number(0.5, 0.01, 1.2)
    memory: float = _number(0.7, 0.02, 1.0)
    overlap: float = _number(0.8, 0.001, 1.0)
    pad: float = _number(32.0, 0.5, 512.0)
    narrow: float = _number(50.0, 0.5, 2000.0)
    row_ns: float = _number(1.0, 0.001, 100.0)
    spread: float = _number(0.5, 0.001, 1.0)
    skew: float = _number(0.3, 0.001, 3.0)


class AllReduceNumbers(_Strict):
    """Numbers of an all-reduce (cost_model/operators/all_reduce.py).

    launch_us : microseconds of a small message between two; each_us : for each GPU more
    direct, ring : shares of the link's bandwidth where each GPU reads everything from all others, and where
        each adds up a part and passes it on
    ring_us : microseconds that the latter takes longer to start; crowded : by how much each GPU beyond two
        slows the others (a shared bus)
    """

    launch_us: float = _number(5.0, 0.1, 100.0)
    each_us: float = _number(0.3, 0.001, 20.0)
    direct: float = _number(0.3, 0.001, 3.0)
    ring: float = _number(0.6, 0.01, 3.0)
    ring_us: float = _number(5.0, 0.01, 200.0)
    crowded: float = _number(0.01, 0.0001, 5.0)


N = TypeVar("N", bound=BaseModel)


class Fitted(_Strict, Generic[N]):
    """Numbers of one operator, GPU and format.

    rows : measurements that they were fitted to
    error : mean |predicted - measured| / measured of held-back shapes over 10 us
    """

    numbers: N
    rows: Rows
    error: Error


class OperatorFits(_Strict):
    """All numbers that ship, by operator, GPU and format.

    elsewhere : by operator, the mean error on a GPU that was left out and predicted by the others' numbers
    """

    source: Prose
    gemm: dict[Name, dict[Name, Fitted[GemmNumbers]]] = {}
    prefill_attention: dict[Name, dict[Name, Fitted[PrefillNumbers]]] = {}
    decode_attention: dict[Name, dict[Name, Fitted[DecodeNumbers]]] = {}
    mla_prefill: dict[Name, dict[Name, Fitted[MlaNumbers]]] = {}
    mla_decode: dict[Name, dict[Name, Fitted[MlaNumbers]]] = {}
    experts: dict[Name, dict[Name, Fitted[ExpertNumbers]]] = {}
    all_reduce: dict[Name, dict[Name, Fitted[AllReduceNumbers]]] = {}
    elsewhere: dict[Name, Error] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Goes to other processes as text: pickle does not find the types of `Fitted`."""
        return type(self).model_validate_json, (self.model_dump_json(),)

    def to_json(self) -> str:
        """Canonical text."""
        text: str = self.model_dump_json(indent=1, exclude_defaults=True)
        return text + "\n"


def merged(base: OperatorFits, own: OperatorFits) -> OperatorFits:
    """Numbers of `own` where it has an operator, GPU and format, and those of `base` elsewhere."""
    tables: dict[str, Any] = {}
    for operator in OperatorFits.model_fields.keys() - {"source", "elsewhere"}:
        before, after = getattr(base, operator), getattr(own, operator)
        tables[operator] = before | {gpu: before.get(gpu, {}) | formats for gpu, formats in after.items()}
    elsewhere = base.elsewhere | own.elsewhere
    return OperatorFits.model_construct(source=own.source, elsewhere=elsewhere, **tables)


@cache
def shipped() -> OperatorFits:
    """The numbers that ship."""
    return load_fits(_SHIPPED)


def load_fits(path: Path) -> OperatorFits:
    """Numbers from the file that benchmarks/simulator/operator_fit.py wrote.

    Raises
    ------
    InputError : unreadable, or not such a file
    """
    try:
        return OperatorFits.model_validate_json(read_text(path, _MAX_BYTES))
    except ValidationError as error:
        remedy = "make one with `python -m benchmarks.simulator.operator_fit`"
        raise schema_error(error, str(path), remedy) from None
