"""The build of the compiled kernels for this processor: what it can do, and how its functions are called."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import torch

FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Types of weights and scales that kernels read."""
_COMPUTED = (torch.float32, torch.bfloat16)
"""Types of the values that a step computes with."""
_ARGUMENTS = {
    # p: address, l: count, f: float, s: name
    "attend_paged": "pllpplpplllllffpp",
    "attend_chunk": "pllpplplllllllffppp",
    "turn_and_store": "plppplllllppl",
    "store_heads": "pllplllpl",
    "multiply_packed": "plllpplp",
    "multiply_heads": "pllllllplpll",
    "multiply_quantised": "plllppllplplplp",
    "multiply_rounded": "plllppllplplplp",
    "multiply_integers": "pplllpplp",
    "find_ranges": "pllp",
    "multiply_grouped": "pplllpplp",
    "multiply_each": "pplplpllp",
    "multiply_mxfp4": "ppllppplp",
    "choose_experts": "pllllllflllppp",
    "gather_experts": "pllllplppp",
    "add_experts": "plpplllp",
    "turn_latents": "pllplplfppllllllpllp",
    "rms_norm": "pllplfllp",
    "layer_norm": "plpplfllp",
    "norm_heads": "plllllplf",
    "relu": "pll",
    "gate": "pllllp",
    "clamped_gate": "plllffp",
    "add": "plpl",
    "take_columns": "plllplp",
    "convert_values": "pllpl",
    "copy_tokens": "pllpllllplpll",
    "count_tokens": "pll",
    "pack_rows": "pllplll",
    "pack_codes": "pplllll",
    "read_pieces": "lllllp",
    "turn_bytes": "",
    "attend_exchange": "p",
    "sum_over_ranks": "ppll",
    "gather_columns": "ppllp",
    "find_repeat": "s",
    "replay": "pl",
    "attends_to": "l",
    "multiplies_pairs": "",
    "multiplies_bytes": "",
    "multiplies_words": "",
    "has_tiles": "",
    "panel_width": "",
}
_RESULTS = {
    "turn_bytes": ctypes.c_long,
    "attend_exchange": ctypes.c_int,
    "find_repeat": ctypes.c_void_p,
    "attends_to": ctypes.c_int,
    "multiplies_pairs": ctypes.c_int,
    "multiplies_bytes": ctypes.c_int,
    "multiplies_words": ctypes.c_int,
    "has_tiles": ctypes.c_int,
    "panel_width": ctypes.c_long,
    "count_tokens": ctypes.c_long,
    "read_pieces": ctypes.c_long,
}
Kept = TypeVar("Kept")
Found = TypeVar("Found", torch.Tensor, torch.Tensor | None)
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float, "s": ctypes.c_char_p}


class Recorder(Protocol):
    """What keeps the calls of a thread while it records; see recording.py."""

    def note(self, name: str, signature: str, arguments: Sequence[float | None]) -> None: ...

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def keep(self, kept: object) -> None: ...

    def apart(self, compute: Callable[[torch.Tensor], Found], x: torch.Tensor) -> Found: ...


class _Here(threading.local):
    recorder: Recorder | None = None


here = _Here()
"""Of each thread: what records its calls, if anything does."""


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can compute with this type on this device."""
    return dtype in _COMPUTED and device.type == "cpu" and loaded() is not None


def computes(device: torch.device, *types: torch.dtype) -> bool:
    """Whether the kernels compute with values of all these types on a device."""
    return all(serves(dtype, device) for dtype in types)


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels multiply by weights of this type on this device, as fast as oneDNN or faster: not
    in bfloat16 where the processor has instructions for whole tiles (AMX), which they do not use."""
    if not serves(dtype, device):
        return False
    library = loaded()
    return dtype != torch.bfloat16 or library is None or not library.has_tiles()


def copies() -> bool:
    """Whether `copy_tokens` and `count_tokens` can be used."""
    return loaded() is not None


def multiplies_pairs() -> bool:
    """Whether this processor multiplies pairs of numbers in bfloat16 by instructions of its own."""
    library = loaded()
    return library is not None and bool(library.multiplies_pairs())


def multiplies_bytes() -> int:
    """By which instructions this processor multiplies bytes (VNNI; I8MM or DotProd on ARM), as kernels number
    them; 0: none."""
    library = loaded()
    return 0 if library is None else library.multiplies_bytes()


def multiplies_words() -> bool:
    """Whether this processor multiplies integers of 16 bits faster than floats (VNNI, or AVX2 alone)."""
    library = loaded()
    return library is not None and bool(library.multiplies_words())


def panel_width() -> int:
    """Outputs of a panel, where `serves`."""
    library = loaded()
    assert library is not None
    return library.panel_width()


def call(name: str, *arguments: float | None) -> None:
    """Call a kernel; ctypes releases the GIL meanwhile."""
    getattr(loaded(), name)(*arguments)
    if (recorder := here.recorder) is not None:
        recorder.note(name, _ARGUMENTS[name], arguments)


def empty(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor for a kernel to write."""
    if (recorder := here.recorder) is not None:
        return recorder.empty(size, dtype)
    return torch.empty(tuple(size), dtype=dtype)


def kept(argument: Kept) -> Kept:
    """Something whose address a kernel gets, and that nobody else holds; it lives as long as what is
    recorded."""
    if (recorder := here.recorder) is not None:
        recorder.keep(argument)
    return argument


def apart(compute: Callable[[torch.Tensor], Found], x: torch.Tensor) -> Found:
    """compute(x), which may use any operators: where calls are recorded, it is called again itself. It may
    write to x and return that, or return nothing."""
    if (recorder := here.recorder) is not None:
        return recorder.apart(compute, x)
    return compute(x)


@cache
def loaded() -> ctypes.CDLL | None:
    """The build for this processor's instruction set; None if none loads. Other processors than
    x86 have one build for all of them."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    wanted = {"avx512": ("avx512", "avx2"), "avx2": ("avx2",)}.get(capability, ("default",))
    for name in wanted:
        for path in Path(__file__).parent.glob(f"_{name}.*.so"):
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                continue
            for function, arguments in _ARGUMENTS.items():
                entry = getattr(library, function)
                entry.argtypes = [_TYPES[letter] for letter in arguments]
                entry.restype = _RESULTS.get(function)
            return library
    return None
