"""Write docs/accuracy.md and its picture: predictions beside what was measured, and where they are bad.

    python -m benchmarks.simulator.accuracy_report --runs runs.csv.gz --steps measured_times.csv

--runs has the columns of `hexgen2 estimate --runs` and --steps those of `hexgen2 estimate --csv`, both with
measured times (docs/simulate.md). Takes about two minutes on two cores.
"""

# ruff: noqa: E501 (lines of the document are longer than lines of code)
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from benchmarks.simulator.cost_model_accuracy import SOURCES, read_measurements
from benchmarks.simulator.serving_accuracy import Compared, compared, errors_of, grouped, pairs
from benchmarks.simulator.serving_runs import for_fitting
from cost_model.coefficients import PRIORS
from cost_model.engines.numbers import shipped as shipped_engines
from cost_model.held_out import left_out_predictions, random_folds
from cost_model.operators.numbers import shipped as shipped_operators
from hexgen2.calibration.runs import measured_runs
from hexgen2.estimation.runs import read_runs

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = "python -m benchmarks.simulator.accuracy_report --runs FILE --steps FILE"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
_FEW = 5
"""Groups of fewer runs are not listed."""

REASONS = """
- **Speculative decoding.** Some runs of DeepSeek-R1 predict several tokens at a time (the public recipes have an option for
  it), which no column says. They are up to 2 times as fast as runs of the same shape without. Where many runs of one version
  are, its mean number of tokens per step is fitted (`speculative` in engines.json); single runs remain far off.
- **Prefix caching.** The runs of Llama-3.1-8B under vLLM 0.12 and one of Qwen3-32B have times below what computing their
  prompts takes at the GPU's peak: their prompts must have been cached. The latter (15000 tokens in, 416 clients, 2 GPUs)
  is most of the mean TTFT for TensorRT-LLM on B200 wherever it is not among the fitted ones.
- **Compiling while serving.** In runs of DeepSeek under SGLang on B200 with 4-bit weights, the first requests of a server
  took about 70 s, which their mean TTFT contains. Those of disaggregated TensorRT-LLM on H100 took about as long.
- **Old kernels.** vLLM 0.12 ran Qwen3-235B's experts at about half the speed at which vLLM 0.16 to 0.19 runs those of MiniMax-M2.5.
- **Full KV caches.** Where the cache holds almost as many requests as there are clients, a little memory more or less
  decides whether requests queue for seconds.
"""


def markdown(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table: text on the left, figures on the right."""
    lines = [list(headings), *([str(cell) for cell in row] for row in rows)]
    marks = ["---" if k == 0 else "---:" for k in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], marks, *lines[1:]]) + "\n"


def errors_by(rows: list[Compared], label: Callable[[Compared], str], least: int = 1) -> list[list[str]]:
    """A line for each group, and one for all."""
    groups = sorted(grouped(rows, label).items())
    found = [[name, *errors_of(own)] for name, own in groups if len(own) >= least]
    return [*found, ["all", *errors_of(rows)]]


def serving(rows: list[Compared]) -> str:
    """Errors of whole servers."""
    headings = ("", "runs", "TPOT mean", "median", "bias", "TTFT mean", "median", "bias")
    bands = {"1-4": 0, "5-16": 1, "17-64": 2, "65+": 3}
    by_clients = sorted(
        grouped(rows, lambda row: row.clients).items(), key=lambda group: bands.get(group[0], 9)
    )
    held_out = [
        [
            ENGINES[name],
            engine.rows,
            *(percent(error) for error in (engine.held_out.rows, engine.held_out.model, engine.held_out.gpu)),
        ]
        for name, engine in shipped_engines().engines.items()
    ]
    return "\n".join(
        (
            markdown(headings, errors_by(rows, lambda row: f"{ENGINES[row.run.engine]}, {row.run.gpu.name}")),
            markdown(("clients", *headings[1:]), [[name, *errors_of(own)] for name, own in by_clients]),
            markdown(
                ("model and format", *headings[1:]),
                errors_by(rows, lambda row: f"{row.run.model.name}, {row.run.model.weight_type}", _FEW)[:-1],
            ),
            "Fits that had not seen a quarter of the runs, or a model, or a GPU at all, predict these runs' TPOT with "
            "these mean errors (%, each run's counted as at most 100):\n",
            markdown(("engine", "fitted to runs", "other runs", "other models", "other GPUs"), held_out),
        )
    )


def without_worst(rows: list[Compared], percentile: int = 2) -> str:
    """What the few runs that are predicted worst add to the means."""
    kept, but_one = [], []
    for kind in ("tpot", "ttft"):
        off = np.sort([abs(row.error(kind)) for row in rows])
        kept.append(f"{100 * off[: len(off) * (100 - percentile) // 100].mean():.1f} % ({kind.upper()})")
        but_one.append(f"{100 * off[:-1].mean():.1f} %")
    return (
        f"A few runs weigh much in the means: without the worst {percentile} % they are {' and '.join(kept)},\n"
        f"without the worst one of each {' and '.join(but_one)}."
    )


def bad_groups(rows: list[Compared]) -> str:
    """The groups that are predicted worst."""
    groups = grouped(
        rows,
        lambda row: (
            f"{ENGINES[row.run.engine]} {row.cells.get('backend_version', '')[:12]}, "
            f"{row.run.model.name} {row.run.model.weight_type}, {row.run.gpu.name}"
        ),
    )

    def tpot(own: list[Compared]) -> float:
        return float(np.median([abs(row.error("tpot")) for row in own]))

    worst = sorted((item for item in groups.items() if len(item[1]) >= _FEW), key=lambda item: -tpot(item[1]))
    headings = ("", "runs", "TPOT mean", "median", "bias", "TTFT mean", "median", "bias")
    return markdown(headings, [[name, *errors_of(own)] for name, own in worst[:10]])


def operators() -> str:
    """Errors of single operators on held-back shapes."""
    fits = shipped_operators()
    kinds = {
        "gemm": "matrix products",
        "prefill_attention": "attention, prompts",
        "decode_attention": "attention, decodes",
        "mla_prefill": "MLA, prompts",
        "mla_decode": "MLA, decodes",
        "experts": "experts",
        "all_reduce": "all-reduce",
    }
    gpus = sorted({gpu for kind in kinds for gpu in getattr(fits, kind)})
    lines = []
    for kind, name in kinds.items():
        cells = []
        for gpu in gpus:
            errors = [fitted.error for fitted in getattr(fits, kind).get(gpu, {}).values()]
            cells.append(f"{100 * min(errors):.0f}-{100 * max(errors):.0f}" if errors else "")
        lines.append([name, *cells, percent(fits.elsewhere.get(kind))])
    return markdown(("", *gpus, "GPU left out"), lines)


def older_steps(path: Path) -> str:
    """Errors of step times of the engines of 2023, by fits to four fifths of them."""
    rows = read_measurements(path)[0]
    measured = np.array([row.seconds for row in rows])
    off = np.abs(left_out_predictions(rows, random_folds(len(rows)), PRIORS) / measured - 1)
    sources = np.array([row.step.engine for row in rows])
    lines = [
        [what, int((sources == source).sum()), percent(float(off[sources == source].mean()))]
        for source, what in SOURCES.items()
        if (sources == source).any()
    ]
    return markdown(("", "steps", "mean error"), [*lines, ["all", len(rows), percent(float(off.mean()))]])


def ranks(rows: list[Compared]) -> str:
    """How often the better deployment is predicted to be the better one."""
    found = list(pairs(rows))
    if not found:
        return "No two deployments can be compared.\n"
    right = np.array([pair.measured * pair.predicted > 0 for pair in found])
    apart = np.expm1(np.abs([pair.measured for pair in found]))
    lines = [["all", len(found), percent(float(right.mean()))]]
    for least in (0.05, 0.1, 0.25):
        clear = apart >= least
        share = percent(float(right[clear].mean()) if clear.any() else None)
        lines.append([f"at least {least:.0%} apart", int(clear.sum()), share])
    return markdown(("", "comparisons", "as measured (%)"), lines)


def percent(share: float | None) -> str:
    """Without a sign; empty where there is none."""
    return "" if share is None else f"{100 * share:.1f}"


def picture(rows: list[Compared], path: Path) -> None:
    """Predicted against measured times, by engine."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for axis, kind in zip(axes, ("tpot", "ttft"), strict=True):
        ends = [np.inf, 0.0]
        for name, label in ENGINES.items():
            own = [row for row in rows if row.run.engine == name]
            measured = np.array([getattr(row, f"{kind}_ms") for row in own])
            predicted = np.array([getattr(row.predicted, f"{kind}_ms") for row in own])
            axis.scatter(measured, predicted, s=5, alpha=0.5, label=label, linewidths=0)
            both = np.concatenate([measured, predicted, [ends[0], ends[1]]])
            ends = [float(both[both > 0].min()), float(both[np.isfinite(both)].max())]
        for factor, style in ((1.0, "-"), (1.25, ":"), (0.8, ":")):
            axis.plot(ends, [factor * end for end in ends], style, color="black", linewidth=0.7)
        axis.set(xscale="log", yscale="log", xlabel=f"measured {kind.upper()}, ms")
        axis.set(ylabel="predicted, ms")
    axes[0].legend(loc="upper left", markerscale=3)
    figure.savefig(path, dpi=110)


def report(runs: Path, steps: Path, jobs: int | None) -> tuple[str, list[Compared]]:
    """The text, and the runs it is about."""
    rows = read_runs(runs)[1]
    others = [row for row in rows if not any(map(for_fitting, measured_runs([row])))]
    known = list(compared(others, jobs))
    text = f"""# Accuracy of predictions

Generated by `{COMMAND}`. Errors are |predicted - measured| / measured in per cent; the bias is the median of the
same with its sign.

## Whole servers

{len(known)} runs of serving engines in closed loops, which the numbers of the engines were not fitted to (a third of a
collection of {len(rows)}, drawn by hash; the fit has seen the others). {len(others) - len(known)} further ones cannot be predicted,
since no cost model knows the operators of their models. Each is predicted by `hexgen2 estimate --runs`, so simulated
with queues and batches, at the lengths and numbers of clients that its row names.

![Predicted against measured TPOT and TTFT](accuracy.png)

{serving(known)}
{without_worst(known)}

For comparison: AIConfigurator 0.12 was reported to be off by 17.2 % (TPOT, median 13.8) and 54.6 % (TTFT) on 872
other runs of the same kind.

### Where it is bad, and why

{bad_groups(known)}{REASONS}
## Does it rank?

Deployments of one model in one format on one GPU type by one engine, with different shapes: which has the higher throughput
per GPU at equal time per output token?

{ranks(known)}
## Operators

Mean errors of shapes that the fit had not seen, from the best to the worst format, and on a GPU that was left out and
predicted from its data sheet by the numbers of the others (`benchmarks/simulator/operator_fit.py`):

{operators()}
## Steps of the engines of 2023

Single steps of the engines that papers measured, by the cost model `calibrated` with coefficients fitted to four fifths
of them:

{older_steps(steps)}"""
    return text, known


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="CSV file with measured runs")
    parser.add_argument("--steps", type=Path, required=True, help="CSV file with measured steps")
    parser.add_argument("--jobs", type=int, help="processes; one per processor if not given")
    asked = parser.parse_args()
    text, known = report(asked.runs, asked.steps, asked.jobs)
    (DOCS / "accuracy.md").write_text(text)
    picture(known, DOCS / "accuracy.png")


if __name__ == "__main__":
    main()
