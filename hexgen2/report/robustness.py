"""Prints how a placement fares where costs are off."""

from __future__ import annotations

from rich.console import Console

from hexgen2.robustness import FinalistRobustness, Robustness

_MEASURES = {
    "goodput_req_s": "requests/s in time",
    "throughput_req_s": "requests/s",
    "mean_e2el_s": "s to the last token",
}


def print_robustness(found: Robustness, console: Console) -> None:
    """Print the chosen finalist's figures, those of the answer without --robust, and the errors."""
    chosen = found.chosen
    if chosen is None:
        console.print("robust      not known: the search ended before costs were perturbed")
        return
    console.print(
        f"robust      {found.perturbations} perturbations of the costs, {len(found.finalists)} finalists: "
        f"{_figures(found, chosen)}"
    )
    first = found.finalists[0]
    if first is not chosen:
        console.print(f"              the answer without --robust: {_figures(found, first)}")
    errors = "; ".join(f"{one.of} {one.error:.0%} ({one.source})" for one in found.errors)
    console.print(f"              mean errors: {errors}", style="dim")
    for assumption in found.assumptions:
        console.print(f"              {assumption}", style="dim")


def _figures(found: Robustness, one: FinalistRobustness) -> str:
    unit, tail = _MEASURES[found.measure], "90th" if found.measure == "mean_e2el_s" else "10th"
    return (
        f"{_figure(one.nominal)} {unit} without errors, {_figure(one.mean)} on average, {tail} percentile "
        f"{_figure(one.p10)}; the best in {one.best_share:.0%}, worst regret {one.worst_regret:.0%}"
    )


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
