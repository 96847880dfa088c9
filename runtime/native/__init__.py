"""Compiled kernels: for what a step computes in float32 and bfloat16 on CPUs (kernels.cpp), its products with
weights (products.cpp), also with quantised ones (quantised.cpp, rounded.cpp) and of integers on both sides
(integers.cpp), the experts of mixtures (experts.cpp), to copy KV caches (copies.cpp), to read weights
(loading.cpp), and to sum over ranks (exchange.cpp).

Values in bfloat16 are computed with in float32, and rounded when they are written.

setup.py builds them for each instruction set if it finds a compiler. If `serves` is False, callers use
torch's operators, which give the same values up to rounding; if `copies` is False, numpy.
"""

from runtime.native.exchange import Exchange, memory_for
from runtime.native.experts import ExpertRows, add_experts, choose_experts, gather_experts
from runtime.native.integers import LARGEST_INPUTS, GroupedIntegers, Integers, find_ranges, pack_bytes
from runtime.native.kernels import (
    PLAIN_KV,
    Spans,
    add,
    attend_chunk,
    attend_paged,
    attends_to,
    clamped_gate,
    converted,
    gate,
    layer_norm,
    norm_heads,
    relu,
    rms_norm,
    store_heads,
    take_columns,
    turn_and_store,
    turn_latents,
)
from runtime.native.library import (
    apart,
    copies,
    empty,
    multiplies,
    multiplies_pairs,
    multiplies_words,
    panel_width,
    serves,
)
from runtime.native.loading import pack_codes, pack_rows, read_pieces
from runtime.native.memory import mapped, use_large_pages
from runtime.native.products import (
    Grouped,
    empty_panels,
    linear,
    multiply_heads,
    pack,
    pack_bias,
    pack_heads,
    pack_mxfp4,
    transposed_head,
)
from runtime.native.quantised import BY_FLOATS, BY_ROUNDED, GroupedQuantised, Quantised, linear_quantised
from runtime.native.recording import Arena, NotRepeatable, Recording, Replay
from runtime.native.rounded import inputs_of_word, pack_words
from runtime.native.tokens import copy_tokens, count_tokens

__all__ = [
    "BY_FLOATS",
    "BY_ROUNDED",
    "LARGEST_INPUTS",
    "PLAIN_KV",
    "Arena",
    "Exchange",
    "ExpertRows",
    "Grouped",
    "GroupedIntegers",
    "GroupedQuantised",
    "Integers",
    "NotRepeatable",
    "Quantised",
    "Recording",
    "Replay",
    "Spans",
    "add",
    "add_experts",
    "apart",
    "attend_chunk",
    "attend_paged",
    "attends_to",
    "choose_experts",
    "clamped_gate",
    "converted",
    "copies",
    "copy_tokens",
    "count_tokens",
    "empty",
    "empty_panels",
    "find_ranges",
    "gate",
    "gather_experts",
    "inputs_of_word",
    "layer_norm",
    "linear",
    "linear_quantised",
    "mapped",
    "memory_for",
    "multiplies",
    "multiplies_pairs",
    "multiplies_words",
    "multiply_heads",
    "norm_heads",
    "pack",
    "pack_bias",
    "pack_bytes",
    "pack_codes",
    "pack_heads",
    "pack_mxfp4",
    "pack_rows",
    "pack_words",
    "panel_width",
    "read_pieces",
    "relu",
    "rms_norm",
    "serves",
    "store_heads",
    "take_columns",
    "transposed_head",
    "turn_and_store",
    "turn_latents",
    "use_large_pages",
]
