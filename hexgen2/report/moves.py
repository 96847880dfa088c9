"""Prints the moves of a re-plan and what they cost."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hexgen2.moves import Cost, Migration, Move

MEANING = {
    "keep": "continues",
    "turn": "new role or batch, same weights",
    "restart": "new role or batch, same weights",
    "reload": "new stages",
    "start": "new replica",
    "stop": "ends",
}


def print_moves(moves: list[Move], migration: Migration, gpus_text, console: Console) -> None:
    """Print what happens to each replica, and the trade-off behind it. gpus_text abbreviates a list of GPU
    ids."""
    table = Table("move", "replica", "GPUs", "load", "drain", "then load", box=None)
    for move in moves:
        old = f" (was {move.from_})" if move.from_ not in (None, move.replica) else ""
        seconds = ["" if s == 0 else f"{s:.1f} s" for s in (move.drain_s, move.load_s)]
        table.add_row(
            f"{move.action}: {MEANING[move.action]}",
            move.replica + old,
            gpus_text(move.gpus),
            f"{move.load_bytes / 1e9:.1f} GB" if move.load_bytes else "",
            *seconds,
        )
    console.print(table)
    console.print(
        f"moves       before {migration.before_req_s:.4g} requests/s; with no move "
        f"{migration.unchanged_req_s:.4g}; over {migration.horizon_s:g} s"
    )
    for label, cost in (
        ("this plan", migration.chosen),
        ("best plan found if moves were free", migration.free),
    ):
        console.print(f"              {label}: {_cost_text(cost, migration.horizon_s)}")
    for assumption in migration.assumptions:
        console.print(f"              {assumption}", style="dim")


def _cost_text(cost: Cost, horizon_s: float) -> str:
    net = cost.req_s - cost.missed_requests / horizon_s
    return (
        f"{cost.req_s:.4g} requests/s, {cost.load_bytes / 1e9:.1f} GB to load, "
        f"{cost.missed_requests:.0f} requests missed, {net:.4g} requests/s net"
    )
