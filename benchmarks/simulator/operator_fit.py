"""Fit the numbers of single operators to measured times, and say how well they predict.

    python -m benchmarks.simulator.operator_fit --tables FOLDER [-o cost_model/operators/fitted.json]

FOLDER has one GPU_OPERATOR.csv.gz per GPU and operator, as AIConfigurator's database has them. A fifth of the
shapes (weights, head configurations, expert layers; whole shapes, with all their sizes) is held back. Printed
for each operator, GPU and format: how many rows were held back, their median and mean error in per cent for
times over 10 us, and the signed median error for small, medium and large times; then the error of each GPU
when its numbers are those of the others. What -o writes is fitted to all shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table as Printed
from scipy.optimize import least_squares

from benchmarks.simulator.operator_tables import GPUS, OperatorTable, read_table
from cost_model.files import write_text
from cost_model.hardware import CATALOGUE, GIB, Accelerator, interconnect_link, usual_interconnect
from cost_model.operators import choose
from cost_model.operators.all_reduce import all_reduce_s
from cost_model.operators.attention import decode_attention_s, prefill_attention_s
from cost_model.operators.cards import FORMATS, KV_BYTES, card_of
from cost_model.operators.experts import experts_s
from cost_model.operators.gemm import gemm_s
from cost_model.operators.mla import DEEPSEEK_V3, mla_decode_s, mla_prefill_s
from cost_model.operators.numbers import (
    AllReduceNumbers,
    DecodeNumbers,
    ExpertNumbers,
    Fitted,
    GemmNumbers,
    MlaNumbers,
    OperatorFits,
    PrefillNumbers,
)

SOURCE = "AIConfigurator 0.12 operator tables (Apache-2.0), vLLM 0.24 (A100: 0.14)"
CARDS = {"B200": Accelerator("B200", 180 * GIB, 2250e12, 7700e9, fp8_speedup=2.0), **CATALOGUE}
L2_BYTES = {"L40S": 96 * 2**20}
"""Caches from which a repeated measurement reads faster than from memory; other cards show no such rows."""
BANDS_S = ((0.0, 30e-6), (30e-6, 300e-6), (300e-6, np.inf))
"""Small, medium and large times."""
FIT_ROWS = 4000
SKIPPED_S = 10e-6
"""Errors are reported over times of at least this."""

Predict = Callable[[Any, Accelerator, str, OperatorTable], np.ndarray]


class Task(NamedTuple):
    """How one operator is fitted: the file's ending, the columns that make its format and its shape, its
    numbers, its formula, and the rows that are used."""

    operator: str
    ending: str
    formats: tuple[str, ...]
    shape: tuple[str, ...]
    numbers: type[BaseModel]
    predict: Predict
    used: Callable[[str, OperatorTable], np.ndarray]


def _gemm(numbers: Any, card: Accelerator, form: str, rows: OperatorTable) -> np.ndarray:
    peaks = card_of(card, form)
    seconds = gemm_s(numbers, peaks, FORMATS[form], rows["m"], rows["n"], rows["k"])
    return np.asarray(np.maximum(seconds, numbers.host_us * 1e-6))


def _gemm_used(gpu: str, rows: OperatorTable) -> np.ndarray:
    """On cards that keep small weights in their cache, only weights that do not fit."""
    weights = np.array([FORMATS[form].weight_bytes for form in rows["gemm_dtype"]]) * rows["n"] * rows["k"]
    hot = (weights < 1.5 * L2_BYTES.get(gpu, 0)) & ((weights > 5e5) | (rows["m"] >= 4096))
    return np.asarray(~hot)


def _window(rows: OperatorTable) -> np.ndarray:
    full = np.full(len(rows.seconds), np.inf)
    return (
        np.where(rows["window_size"] > 0, rows["window_size"], full)
        if "window_size" in rows.columns
        else full
    )


def _prefill(numbers: Any, card: Accelerator, form: str, rows: OperatorTable) -> np.ndarray:
    prompt, batch = rows["isl"], rows["batch_size"]
    seen = np.minimum(_window(rows), prompt)
    attended = batch * (seen * (seen + 1) / 2 + (prompt - seen) * seen)
    heads = (rows["num_heads"], rows["num_key_value_heads"], rows["head_dim"])
    peaks = card_of(card, "bfloat16")
    return np.asarray(
        prefill_attention_s(numbers, peaks, KV_BYTES[form], batch, batch * prompt, attended, *heads)
    )


def _usual_heads(rows: OperatorTable) -> np.ndarray:
    """Heads of 64, 128 or 256 elements: others run on kernels of their own."""
    return np.isin(rows["head_dim"], (64, 128, 256))


def _prefill_used(gpu: str, rows: OperatorTable) -> np.ndarray:
    return np.asarray(_usual_heads(rows) & (rows["isl"] >= 16))


def _decode(numbers: Any, card: Accelerator, form: str, rows: OperatorTable) -> np.ndarray:
    batch = rows["batch_size"]
    context = batch * np.minimum(rows["step"] + 1, _window(rows))
    heads = (rows["num_heads"], rows["num_key_value_heads"], rows["head_dim"])
    peaks = card_of(card, "bfloat16")
    return np.asarray(decode_attention_s(numbers, peaks, KV_BYTES[form], batch, context, *heads))


def _decode_used(gpu: str, rows: OperatorTable) -> np.ndarray:
    """Contexts of at least 64; on cards that keep small KV caches in their own cache, only larger ones."""
    context = rows["batch_size"] * np.minimum(rows["step"] + 1, _window(rows))
    values = np.array([KV_BYTES[form] for form in rows["kv_cache_dtype"]])
    cached = 2 * values * context * rows["num_key_value_heads"] * rows["head_dim"]
    hot = (cached < 1.3 * L2_BYTES.get(gpu, 0)) & (cached > L2_BYTES.get(gpu, 0) / 32)
    return np.asarray(_usual_heads(rows) & (rows["step"] >= 63) & (rows["batch_size"] <= 1024) & ~hot)


def _mla_prefill(numbers: Any, card: Accelerator, form: str, rows: OperatorTable) -> np.ndarray:
    gemm, _ = form.split("/")
    prompt, batch = rows["isl"], rows["batch_size"]
    cards = card_of(card, gemm), card_of(card, "bfloat16")
    attended = batch * prompt * (prompt + 1) / 2
    heads = rows["num_heads"] / rows["tp_size"]
    return np.asarray(
        mla_prefill_s(numbers, *cards, FORMATS[gemm], DEEPSEEK_V3, batch * prompt, attended, batch, heads)
    )


def _mla_decode(numbers: Any, card: Accelerator, form: str, rows: OperatorTable) -> np.ndarray:
    gemm, kv = form.split("/")
    cards, batch = (card_of(card, gemm), card_of(card, "bfloat16")), rows["batch_size"]
    sizes = (batch, batch * rows["step"], rows["num_heads"] / rows["tp_size"])
    return np.asarray(mla_decode_s(numbers, *cards, FORMATS[gemm], KV_BYTES[kv], DEEPSEEK_V3, *sizes))


def _experts(numbers: Any, card: Accelerator, form: str, rows: OperatorTable) -> np.ndarray:
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    balanced = (rows["distribution"] == "balanced").astype(float)
    plain = (rows["topk"] == 22) | (rows["inter_size"] == 1856)
    sizes = *(rows[name] for name in names), balanced, np.where(plain, 2.0, 3.0)
    return np.asarray(experts_s(numbers, card_of(card, form), FORMATS[form], *sizes))


def _all_reduce(numbers: Any, card: Accelerator, form: str, rows: OperatorTable) -> np.ndarray:
    link = interconnect_link("nvlink" if card.name == "B200" else usual_interconnect(card), card)[0]
    return np.asarray(all_reduce_s(numbers, link.bandwidth_bytes_s, rows["num_gpus"], rows["message_size"]))


def _all(gpu: str, rows: OperatorTable) -> np.ndarray:
    return np.ones(len(rows.seconds), bool)


HEADS = ("num_heads", "num_key_value_heads", "head_dim", "window_size")
EXPERTS = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
TASKS = (
    Task("gemm", "gemm", ("gemm_dtype",), ("n", "k"), GemmNumbers, _gemm, _gemm_used),
    Task(
        "prefill_attention",
        "prefill_attention",
        ("kv_cache_dtype",),
        HEADS,
        PrefillNumbers,
        _prefill,
        _prefill_used,
    ),
    Task(
        "decode_attention",
        "decode_attention",
        ("kv_cache_dtype",),
        HEADS,
        DecodeNumbers,
        _decode,
        _decode_used,
    ),
    Task(
        "mla_prefill",
        "mla_prefill",
        ("gemm_type", "kv_cache_dtype"),
        ("num_heads", "batch_size"),
        MlaNumbers,
        _mla_prefill,
        _all,
    ),
    Task(
        "mla_decode",
        "mla_decode",
        ("gemm_type", "kv_cache_dtype"),
        ("num_heads", "batch_size"),
        MlaNumbers,
        _mla_decode,
        _all,
    ),
    Task("experts", "moe", ("moe_dtype",), EXPERTS, ExpertNumbers, _experts, _all),
    Task(
        "all_reduce",
        "all_reduce_engine",
        ("backend",),
        ("message_size",),
        AllReduceNumbers,
        _all_reduce,
        _all,
    ),
    Task(
        "all_reduce",
        "nccl",
        ("op_name", "nccl_dtype"),
        ("message_size",),
        AllReduceNumbers,
        _all_reduce,
        _all,
    ),
)
FORMAT_NAMES = {"vllm_graph": "graph", "vllm_eager": "eager", "all_reduce/half": "nccl"}


def groups(task: Task, gpu: str, folder: Path) -> Iterator[tuple[str, OperatorTable]]:
    """The formats of a GPU's table that the formulas know, with their rows."""
    path = folder / f"{gpu}_{task.ending}.csv.gz"
    if not path.exists():
        return
    table = read_table(path)
    labels = np.array(
        ["/".join(map(str, key)) for key in zip(*(table[name] for name in task.formats), strict=True)]
    )
    known = FORMAT_NAMES if task.operator == "all_reduce" else None
    for label in sorted(set(labels)):
        name = known.get(label, "") if known else label
        if name and name.split("/")[0] in {*FORMATS, *FORMAT_NAMES.values()}:
            rows = table.where(labels == label)
            yield name, rows.where(task.used(gpu, rows))


def held_back(task: Task, rows: OperatorTable) -> np.ndarray:
    """A mask of the rows of every fifth shape, in random order."""
    columns = [rows[name] for name in task.shape if name in rows.columns]
    _, shape = np.unique(np.stack(columns), axis=1, return_inverse=True)
    count = shape.max() + 1
    return np.random.default_rng(0).permutation(count)[shape.reshape(-1)] < max(1, count // 5)


def free_fields(task: Task, form: str) -> list[str]:
    """The numbers that a format's rows can tell: launches of the host's hide those of blocks of fp8."""
    names = list(task.numbers.model_fields)
    if task.operator != "gemm":
        return names
    fixed = {"bfloat16": {"row_ns", "host_us"}, "fp8_block": {"launch_us", "row_ns"}}
    return [name for name in names if name not in fixed.get(form, {"host_us"})]


def fit(task: Task, card: Accelerator, form: str, rows: OperatorTable, start: BaseModel) -> BaseModel:
    """Numbers fitted to rows: least squares of log errors, with little weight on outliers."""
    if len(rows.seconds) > FIT_ROWS:
        rows = rows.where(np.random.default_rng(1).choice(len(rows.seconds), FIT_ROWS, replace=False))
    names = free_fields(task, form)
    limits = [_limits(task.numbers, name) for name in names]
    low, high = (np.log([max(limit[side], 1e-6) for limit in limits]) for side in (0, 1))
    fixed = {name: getattr(start, name) for name in task.numbers.model_fields}
    target = np.log(rows.seconds)

    def numbers(vector: np.ndarray) -> BaseModel:
        return task.numbers.model_construct(
            **{**fixed, **dict(zip(names, np.exp(vector).tolist(), strict=True))}
        )

    def residuals(vector: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(task.predict(numbers(vector), card, form, rows)) - target)

    first = np.clip(np.log([max(getattr(start, name), 1e-6) for name in names]), low + 1e-6, high - 1e-6)
    found = least_squares(residuals, first, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-4)
    values = {**fixed, **dict(zip(names, np.exp(found.x).tolist(), strict=True))}
    return task.numbers(**{name: _rounded(task.numbers, name, value) for name, value in values.items()})


def _limits(numbers: type[BaseModel], name: str) -> tuple[float, float]:
    bounds = numbers.model_fields[name].metadata
    least = next(bound.ge for bound in bounds if hasattr(bound, "ge"))
    most = next(bound.le for bound in bounds if hasattr(bound, "le"))
    return float(least), float(most)


def _rounded(numbers: type[BaseModel], name: str, value: float) -> float:
    """Four digits, within the limits."""
    least, most = _limits(numbers, name)
    return min(max(float(f"{value:.4g}"), least), most)


def starting(task: Task, form: str, fitted: dict[str, Fitted[Any]]) -> BaseModel:
    """Where a fit starts. Blocks of fp8 were timed from the host, which hides what the GPU takes for small
    ones: that is taken from fp8."""
    if task.operator != "gemm" or form == "bfloat16":
        return task.numbers()
    if form == "fp8_block":
        return fitted["fp8"].numbers.model_copy(update={"host_us": 150.0})
    return task.numbers().model_copy(update={"row_ns": 3.0})


def error_of(predicted: np.ndarray, seconds: np.ndarray) -> float:
    """Mean relative error of times over SKIPPED_S."""
    counted = seconds >= SKIPPED_S
    return float(np.abs(predicted / seconds - 1)[counted].mean()) if counted.any() else 0.0


def report(
    operator: str, gpu: str, form: str, predicted: np.ndarray, seconds: np.ndarray, printed: Printed
) -> None:
    """Add one line about held-back rows."""
    off = predicted / seconds - 1
    counted = seconds >= SKIPPED_S
    bands = [(seconds >= low) & (seconds < high) for low, high in BANDS_S]
    biases = [f"{100 * np.median(off[band]):+.0f}" if band.any() else "" for band in bands]
    errors = (
        [f"{100 * f(np.abs(off[counted])):.1f}" for f in (np.median, np.mean)] if counted.any() else ["", ""]
    )
    printed.add_row(operator, gpu, form, str(len(seconds)), *errors, *biases)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit operator times, and say how well they predict.")
    parser.add_argument("--tables", type=Path, required=True, help="folder of GPU_OPERATOR.csv.gz files")
    parser.add_argument(
        "-o", "--output", type=Path, help="write the numbers, fitted to all shapes, to this file"
    )
    parser.add_argument("--only", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    printed = Printed(
        title="Held-back shapes: error % over 10 us, bias % below 30, 300 us, above", padding=(0, 1)
    )
    for heading in ("operator", "GPU", "format", "rows", "median", "mean", "small", "medium", "large"):
        printed.add_column(heading, justify="left" if heading in ("operator", "GPU", "format") else "right")
    found: dict[str, Any] = {}
    measured: dict[tuple[str, str, str], tuple[Task, OperatorTable]] = {}
    for task in TASKS:
        if arguments.only and task.operator not in arguments.only:
            continue
        for gpu in GPUS:
            fitted = found.setdefault(task.operator, {}).setdefault(gpu, {})
            for form, rows in groups(task, gpu, arguments.tables):
                held, card = held_back(task, rows), CARDS[gpu]
                kept, out = rows.where(~held), rows.where(held)
                numbers = fit(task, card, form, kept, starting(task, form, fitted))
                predicted = task.predict(numbers, card, form, out)
                report(task.operator, gpu, form, predicted, out.seconds, printed)
                error = error_of(predicted, out.seconds)
                if arguments.output:
                    numbers = fit(task, card, form, rows, numbers)
                fitted[form] = Fitted(numbers=numbers, rows=len(rows.seconds), error=round(error, 4))
                measured[(task.operator, gpu, form)] = (task, rows)
    Console(width=130).print(printed)
    elsewhere: dict[str, list[float]] = {}
    for (operator, gpu, form), (task, rows) in measured.items():
        others = {name: formats for name, formats in found[operator].items() if name != gpu}
        related = {"H100": "H200", "H200": "H100"}.get(gpu)
        if related and form in others[related]:
            numbers = others[related][form].numbers
        elif any(form in formats for formats in others.values()):
            numbers = choose(others, Accelerator("", 1, 1, 1), form, 0.0).numbers
        else:
            continue
        error = error_of(task.predict(numbers, CARDS[gpu], form, rows), rows.seconds)
        elsewhere.setdefault(operator, []).append(error)
        print(f"{operator} {gpu} {form} by the others: {100 * error:.1f} %")
    if arguments.output:
        means = {name: round(float(np.mean(errors)), 4) for name, errors in elsewhere.items()}
        write_text(arguments.output, OperatorFits(source=SOURCE, elsewhere=means, **found).to_json())


if __name__ == "__main__":
    main()
