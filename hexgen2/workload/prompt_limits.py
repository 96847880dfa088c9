"""Which requests routes get that take long prompts only, and how long the prompts of each route are then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cost_model.lengths import RequestLengths


def long_prompts(lengths: RequestLengths, least_tokens: float) -> tuple[float, float]:
    """Of the requests whose prompts are at least so long: their share of all, and their mean prompt over that
    of all; (0, 1) if there are none."""
    total = math.fsum(weight for _, _, weight in lengths.classes)
    long = [(isl, weight) for isl, _, weight in lengths.classes if isl >= least_tokens]
    found = math.fsum(weight for _, weight in long)
    if found <= 0:
        return 0.0, 1.0
    return found / total, math.fsum(isl * weight for isl, weight in long) / found / lengths.isl


def prompt_factors(lengths: RequestLengths, flows: Sequence[tuple[float, int]]) -> list[float]:
    """Of each route, the mean prompt of its requests over that of all.

    The routes with the highest limits have the first choice. If they should get more requests than there are
    long ones, they are taken to have the mean of these.

    Parameters
    ----------
    flows : of each route, requests/s and the fewest prompt tokens that it takes
    """
    total = math.fsum(flow for flow, _ in flows)
    limits = sorted({least for _, least in flows}, reverse=True)
    if limits in ([], [0]) or total <= 0:
        return [1.0] * len(flows)
    weights = math.fsum(weight for _, _, weight in lengths.classes)
    left = [weight / weights for _, _, weight in lengths.classes]
    factor_of: dict[int, float] = {}
    for least in limits:
        asked = math.fsum(flow for flow, own in flows if own == least) / total
        able = [isl >= least or least == limits[-1] for isl, _, _ in lengths.classes]
        there = math.fsum(share for share, fits in zip(left, able, strict=True) if fits)
        if there <= 0:
            factor_of[least] = 1.0
            continue
        taken = min(1.0, asked / there)
        tokens = math.fsum(
            c[0] * share for c, share, fits in zip(lengths.classes, left, able, strict=True) if fits
        )
        factor_of[least] = tokens / there / lengths.isl
        left = [share * (1 - taken) if fits else share for share, fits in zip(left, able, strict=True)]
    return [factor_of[least] for _, least in flows]


Pair = tuple[str, str]
"""The replicas that prefill and decode the requests of a route."""


def divided(
    lengths: RequestLengths, flows: Mapping[Pair, float], limits: Mapping[Pair, int]
) -> tuple[dict[Pair, float], dict[Pair, int]]:
    """Flows in requests/s if some routes take long prompts only: as many tokens, so fewer requests, and the
    other routes to the same replica that decodes take the more of them. Where there are no such routes, or
    too few long prompts, limits are left out.

    Parameters
    ----------
    flows : requests/s if all routes had requests of all lengths
    limits : the fewest prompt tokens that a route takes, of some routes

    Returns
    -------
    the flows, and the limits that are left
    """
    found, kept = dict(flows), dict[Pair, int]()
    for target in dict.fromkeys(decode for pair in limits if limits[pair] for decode in pair[1:]):
        long = {pair: limits[pair] for pair in flows if pair[1] == target and limits.get(pair)}
        others = [pair for pair in flows if pair[1] == target and pair not in long]
        rest = math.fsum(flows[pair] for pair in others)
        if not long or rest <= 0:
            continue
        whole = rest + math.fsum(flows[pair] for pair in long)
        fewer = {pair: flows[pair] / long_prompts(lengths, least)[1] for pair, least in long.items()}
        enough = all(
            math.fsum(fewer[pair] for pair, own in long.items() if own >= least)
            <= long_prompts(lengths, least)[0] * whole * (1 + 1e-9)
            for least in long.values()
        )
        if not enough:
            continue
        more = (whole - math.fsum(fewer.values())) / rest
        found |= fewer | {pair: flows[pair] * more for pair in others}
        kept |= long
    return found, kept
