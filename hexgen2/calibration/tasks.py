"""How each operator's table is read and predicted: its columns, its rows that count, its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from cost_model.dtypes import KV_BYTES, WEIGHT_BYTES
from cost_model.errors import InputError
from cost_model.hardware import Accelerator, find_accelerator, interconnect_link, usual_interconnect
from cost_model.operators.all_reduce import all_reduce_s
from cost_model.operators.attention import decode_attention_s, prefill_attention_s
from cost_model.operators.cards import card_of
from cost_model.operators.experts import experts_s
from cost_model.operators.gemm import gemm_s
from cost_model.operators.mla import DEEPSEEK_V3, mla_decode_s, mla_prefill_s
from cost_model.operators.numbers import (
    AllReduceNumbers,
    DecodeNumbers,
    ExpertNumbers,
    GemmNumbers,
    MlaNumbers,
    PrefillNumbers,
)
from hexgen2.calibration.tables import ENDINGS, OperatorTable, read_table

FORMATS: dict[str, Any] = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "int8_wo": "int8",
    "int4_wo": "int4",
    "nvfp4": "nvfp4",
    "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4",
}
"""The tables' names of formats, and ours."""
OTHER_KERNELS = {("B200", "w4a16_mxfp4")}
"""Tables of kernels that unpack weights to 16 bits on a card that need not."""
WAYS = {"vllm_graph": "graph", "vllm_eager": "eager", "all_reduce/half": "nccl"}
L2_BYTES = {"L40S": 96 * 2**20}
"""Caches from which a repeated measurement reads faster than from memory; other cards show no such rows."""

Predict = Callable[[Any, Accelerator, Any, OperatorTable], np.ndarray]
"""Seconds of rows, from numbers, a card and a format."""


class Task(NamedTuple):
    """How one operator is fitted.

    ending : of the names of its files; formats : columns that make its format; sizes : columns of numbers
    shape : columns by which rows are held back together
    numbers, predict : what is fitted, and the formula
    used : a mask of a GPU's rows that count
    """

    operator: str
    ending: str
    formats: tuple[str, ...]
    sizes: tuple[str, ...]
    shape: tuple[str, ...]
    numbers: type[BaseModel]
    predict: Predict
    used: Callable[[str, OperatorTable], np.ndarray]


def _gemm(numbers: Any, card: Accelerator, form: Any, rows: OperatorTable) -> np.ndarray:
    peaks = card_of(card, form)
    seconds = gemm_s(numbers, peaks, rows["m"], rows["n"], rows["k"])
    return np.asarray(np.maximum(seconds, numbers.host_us * 1e-6))


def _gemm_used(gpu: str, rows: OperatorTable) -> np.ndarray:
    """On cards that keep small weights in their cache, only weights that do not fit."""
    weights = np.array([WEIGHT_BYTES[FORMATS[form]] for form in rows["gemm_dtype"]]) * rows["n"] * rows["k"]
    hot = (weights < 1.5 * L2_BYTES.get(gpu, 0)) & ((weights > 5e5) | (rows["m"] >= 4096))
    return np.asarray(~hot)


def _window(rows: OperatorTable) -> np.ndarray:
    full = np.full(len(rows.seconds), np.inf)
    return (
        np.where(rows["window_size"] > 0, rows["window_size"], full)
        if "window_size" in rows.columns
        else full
    )


def _prefill(numbers: Any, card: Accelerator, form: Any, rows: OperatorTable) -> np.ndarray:
    prompt, batch = rows["isl"], rows["batch_size"]
    seen = np.minimum(_window(rows), prompt)
    attended = batch * (seen * (seen + 1) / 2 + (prompt - seen) * seen)
    heads = (rows["num_heads"], rows["num_key_value_heads"], rows["head_dim"])
    peaks = card_of(card, "bf16")
    return np.asarray(
        prefill_attention_s(numbers, peaks, KV_BYTES[form], batch, batch * prompt, attended, *heads)
    )


def _usual_heads(rows: OperatorTable) -> np.ndarray:
    """Heads of 64, 128 or 256 elements: others run on kernels of their own."""
    return np.isin(rows["head_dim"], (64, 128, 256))


def _prefill_used(gpu: str, rows: OperatorTable) -> np.ndarray:
    return np.asarray(_usual_heads(rows) & (rows["isl"] >= 16))


def _decode(numbers: Any, card: Accelerator, form: Any, rows: OperatorTable) -> np.ndarray:
    batch = rows["batch_size"]
    context = batch * np.minimum(rows["step"] + 1, _window(rows))
    heads = (rows["num_heads"], rows["num_key_value_heads"], rows["head_dim"])
    peaks = card_of(card, "bf16")
    return np.asarray(decode_attention_s(numbers, peaks, KV_BYTES[form], batch, context, *heads))


def _decode_used(gpu: str, rows: OperatorTable) -> np.ndarray:
    """Contexts of at least 64; on cards that keep small KV caches in their own cache, only larger ones."""
    context = rows["batch_size"] * np.minimum(rows["step"] + 1, _window(rows))
    values = np.array([KV_BYTES[FORMATS[form]] for form in rows["kv_cache_dtype"]])
    cached = 2 * values * context * rows["num_key_value_heads"] * rows["head_dim"]
    hot = (cached < 1.3 * L2_BYTES.get(gpu, 0)) & (cached > L2_BYTES.get(gpu, 0) / 32)
    return np.asarray(_usual_heads(rows) & (rows["step"] >= 63) & (rows["batch_size"] <= 1024) & ~hot)


def _mla_prefill(numbers: Any, card: Accelerator, form: Any, rows: OperatorTable) -> np.ndarray:
    gemm, _ = form.split("/")
    prompt, batch = rows["isl"], rows["batch_size"]
    cards = card_of(card, gemm), card_of(card, "bf16")
    attended = batch * prompt * (prompt + 1) / 2
    heads = rows["num_heads"] / rows["tp_size"]
    return np.asarray(mla_prefill_s(numbers, *cards, DEEPSEEK_V3, batch * prompt, attended, batch, heads))


def _mla_decode(numbers: Any, card: Accelerator, form: Any, rows: OperatorTable) -> np.ndarray:
    gemm, kv = form.split("/")
    cards, batch = (card_of(card, gemm), card_of(card, "bf16")), rows["batch_size"]
    sizes = (batch, batch * rows["step"], rows["num_heads"] / rows["tp_size"])
    return np.asarray(mla_decode_s(numbers, *cards, KV_BYTES[kv], DEEPSEEK_V3, *sizes))


def _experts(numbers: Any, card: Accelerator, form: Any, rows: OperatorTable) -> np.ndarray:
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    balanced = (rows["distribution"] == "balanced").astype(float)
    plain = ((rows["topk"] == 22) | (rows["inter_size"] == 1856)) & (card.name != "A100-80GB")
    sizes = *(rows[name] for name in names), balanced, np.where(plain, 2.0, 3.0)
    return np.asarray(experts_s(numbers, card_of(card, form), *sizes))


def _experts_used(gpu: str, rows: OperatorTable) -> np.ndarray:
    """Experts within a node; on cards that keep small weights in their cache, only more of them."""
    pairs = rows["num_tokens"] * rows["topk"]
    matrices = 3 * np.minimum(rows["num_experts"], pairs) / rows["moe_ep_size"] / rows["moe_tp_size"]
    values = np.array([WEIGHT_BYTES[FORMATS[form]] if form in FORMATS else 0.0 for form in rows["moe_dtype"]])
    weights = values * matrices * rows["hidden_size"] * rows["inter_size"]
    hot = weights < 1.5 * L2_BYTES.get(gpu, 0)
    return np.asarray((rows["moe_tp_size"] * rows["moe_ep_size"] <= 16) & ~hot)


def _all_reduce(numbers: Any, card: Accelerator, form: Any, rows: OperatorTable) -> np.ndarray:
    link = interconnect_link(usual_interconnect(card), card)[0]
    size = MESSAGE_BYTES * rows["message_size"]
    return np.asarray(all_reduce_s(numbers, link.bandwidth_bytes_s, rows["num_gpus"], size))


def _all(gpu: str, rows: OperatorTable) -> np.ndarray:
    return np.ones(len(rows.seconds), bool)


class Found(NamedTuple):
    """A file of a folder that has an operator's times on a GPU."""

    task: Task
    gpu: str
    path: Path


HEADS = ("num_heads", "num_key_value_heads", "head_dim")
LATENT = ("num_heads", "tp_size", "batch_size")
EXPERTS = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
MESSAGE = ("num_gpus", "message_size")
MESSAGE_BYTES = 2.0
"""Tables count the 16-bit values of a message. (2^29 of them take 4.0 ms among 8 H200: 268 GB/s, which is
what NCCL reaches there; were they bytes, it would be half of that.)"""
MAY_BE_ZERO = ("step", "window_size")
TASKS = (
    Task("gemm", "gemm", ("gemm_dtype",), ("m", "n", "k"), ("n", "k"), GemmNumbers, _gemm, _gemm_used),
    Task(
        "prefill_attention",
        "prefill_attention",
        ("kv_cache_dtype",),
        ("batch_size", "isl", *HEADS),
        (*HEADS, "window_size"),
        PrefillNumbers,
        _prefill,
        _prefill_used,
    ),
    Task(
        "decode_attention",
        "decode_attention",
        ("kv_cache_dtype",),
        ("batch_size", "step", *HEADS),
        (*HEADS, "window_size"),
        DecodeNumbers,
        _decode,
        _decode_used,
    ),
    Task(
        "mla_prefill",
        "mla_prefill",
        ("gemm_type", "kv_cache_dtype"),
        (*LATENT, "isl"),
        ("num_heads", "batch_size"),
        MlaNumbers,
        _mla_prefill,
        _all,
    ),
    Task(
        "mla_decode",
        "mla_decode",
        ("gemm_type", "kv_cache_dtype"),
        (*LATENT, "step"),
        ("num_heads", "batch_size"),
        MlaNumbers,
        _mla_decode,
        _all,
    ),
    Task(
        "experts",
        "moe",
        ("moe_dtype",),
        ("num_tokens", *EXPERTS),
        EXPERTS,
        ExpertNumbers,
        _experts,
        _experts_used,
    ),
    Task(
        "all_reduce",
        "all_reduce_engine",
        ("backend",),
        MESSAGE,
        ("message_size",),
        AllReduceNumbers,
        _all_reduce,
        _all,
    ),
    Task(
        "all_reduce",
        "nccl",
        ("op_name", "nccl_dtype"),
        MESSAGE,
        ("message_size",),
        AllReduceNumbers,
        _all_reduce,
        _all,
    ),
)


def find_tables(folder: Path) -> tuple[list[Found], list[str]]:
    """The tables in a folder, by operator and GPU, and its other CSV files.

    Raises
    ------
    InputError : no folder, a GPU that the catalogue lacks, or two files for one table
    """
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(ENDINGS))
    except OSError as error:
        raise InputError(str(folder), "", f"cannot be read ({error.strerror})", "name a folder") from None
    found: dict[tuple[int, str], Found] = {}
    others = []
    for name in names:
        stem = name.removesuffix(".gz").removesuffix(".csv")
        place = next((k for k, task in enumerate(TASKS) if stem.endswith(f"_{task.ending}")), None)
        if place is None:
            others.append(name)
            continue
        path, task = folder / name, TASKS[place]
        gpu = find_accelerator(stem.removesuffix(f"_{task.ending}"), source=str(path), key="GPU").name
        if (place, gpu) in found:
            problem = f"is a second table of {task.ending} on {gpu}"
            raise InputError(str(path), "", problem, f"leave it or {found[place, gpu].path.name} out")
        found[place, gpu] = Found(task, gpu, path)
    return [found[key] for key in sorted(found)], others


def groups(table: Found) -> Iterator[tuple[str, OperatorTable]]:
    """The formats of a table that the formulas know, with their rows that are used: at least one.

    Raises
    ------
    InputError : as `read_table`
    """
    task, gpu, path = table
    also = ("distribution",) if task.operator == "experts" else ()
    rows = read_table(path, task.sizes, (*task.formats, *also), MAY_BE_ZERO)
    labels = np.array(["/".join(key) for key in zip(*(rows[name] for name in task.formats), strict=True)])
    for label in sorted(set(labels)):
        name = WAYS.get(label) or "/".join(FORMATS.get(part, "") for part in label.split("/"))
        if all(name.split("/")) and (gpu, label) not in OTHER_KERNELS:
            of_label = rows.where(labels == label)
            used = of_label.where(task.used(gpu, of_label))
            if len(used.seconds):
                yield name, used
