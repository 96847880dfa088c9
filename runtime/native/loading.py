"""Reading weights, and laying them out in panels (loading.cpp)."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from runtime.native import library
from runtime.native.memory import mapped

_TOO_SHORT = "the file is too short"


def pack_rows(packed: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """Write rows [n, in] of a matrix of any floating-point type, from output `first` on, into its panels."""
    if packed.dtype != torch.float32:
        rows, kind = in_pairs(rows.to(packed.dtype)), torch.float32  # a pair moves like a float
        inputs = rows.shape[1] // 2
    else:
        rows = rows if rows.dtype in library.FLOATS and rows.stride(1) == 1 else rows.float().contiguous()
        inputs, kind = rows.shape[1], rows.dtype
    library.call(
        "pack_rows",
        packed.data_ptr(),
        inputs,
        first,
        rows.data_ptr(),
        rows.stride(0) * rows.itemsize,
        len(rows),
        library.FLOATS[kind],
    )


def pack_codes(codes: torch.Tensor, is_packed: bool, flipped: int) -> torch.Tensor:
    """Codes [out, in] uint8 -> panels [out / width, in, bytes]; the last row is repeated to fill them.

    Parameters
    ----------
    is_packed : codes have four bits: two to a byte, the lower ones for the first half of the panel
    flipped : bits to invert where they are not packed
    """
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    rows, inputs = codes.shape
    width = library.panel_width()
    packed = mapped((-(-rows // width), inputs, width // 2 if is_packed else width), torch.uint8)
    library.call(
        "pack_codes",
        packed.data_ptr(),
        codes.data_ptr(),
        codes.stride(0),
        rows,
        inputs,
        is_packed,
        flipped,
    )
    return packed


def read_pieces(file: int, at: int, step: int, piece: int, count: int, into: torch.Tensor) -> None:
    """Fill a contiguous tensor with `count` pieces of a file, `piece` bytes each, the first one at byte `at`
    and each `step` bytes behind the one before.

    Raises
    ------
    OSError : the file can't be read, or ends
    """
    build = library.loaded()
    if build is None:
        view = into.view(-1).view(torch.uint8).numpy().data
        for number in range(count):
            part = view[number * piece : (number + 1) * piece]
            while part:
                read = os.preadv(file, [part], at + number * step + piece - len(part))
                if read == 0:
                    raise OSError(_TOO_SHORT)
                part = part[read:]
        return
    if error := build.read_pieces(file, at, step, piece, count, into.data_ptr()):
        raise OSError(_TOO_SHORT) if error < 0 else OSError(error, os.strerror(error))


def in_pairs(rows: torch.Tensor) -> torch.Tensor:
    """[n, in] -> contiguous, padded with zeros to an even number of columns."""
    return (F.pad(rows, (0, 1)) if rows.shape[1] % 2 else rows).contiguous()
