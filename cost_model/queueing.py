"""Queues of a replica: what requests wait for, and the load at which enough of them meet a target.

Requests arrive at random (a Poisson process). A prefill replica is an M/G/1 queue: one prompt after the
other, whose times differ by class. A decode replica takes each request at once into its running batch,
so it is an M/G/inf queue: the requests under way are Poisson, and their number sets the pace of all.

Plain functions of rates in requests/s and times in seconds, for the search and for the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from cost_model.architecture import ModelArchitecture
from cost_model.lengths import RequestLengths
from cost_model.portable import exp, twelve_digits

_STEPS = 60
_JUMPS = 8
"""Numbers of requests at which a queue of tiled steps is looked at for jumps of their time."""
_JUMP = 0.6
"""Requests/s just beyond such a jump, at least, of those just before it: over the best plans of ten kinds of
nodes, four models, four workloads and three engines the least was 0.66."""
_BEYOND = 1 + 1e-9
"""Just beyond a number of requests that fills whole tiles."""


@dataclass(frozen=True)
class ServiceMix:
    """Prefill times of the classes: the share of requests, and the time in units of the mean, of each."""

    shares: tuple[float, ...]
    relative: tuple[float, ...]

    @classmethod
    def of(cls, model: ModelArchitecture, lengths: RequestLengths) -> ServiceMix:
        """A prompt takes time in proportion to its FLOPs: two per parameter and token, and four per attended
        token and element of a head (prefill is bound by compute)."""
        times = []
        for isl, osl, _ in lengths.classes:
            attended = RequestLengths.fixed(isl, osl).prompt_attended(model.window)
            times.append(isl * (2 * model.active_layer_params + model.prompt_attended_flops * attended))
        total = math.fsum(weight for _, _, weight in lengths.classes)
        shares = tuple(weight / total for _, _, weight in lengths.classes)
        mean = math.fsum(share * time for share, time in zip(shares, times, strict=True))
        return cls(shares, tuple(time / mean for time in times))

    @cached_property
    def second_moment(self) -> float:
        """E[S^2] / E[S]^2 of the service time S: 1 if all prompts take as long."""
        return math.fsum(w * r * r for w, r in zip(self.shares, self.relative, strict=True))


@dataclass(frozen=True)
class PrefillQueue:
    """A prefill replica: requests/s at full load, seconds from the start of a full step to its end, mean
    prompts in a step (below 1 where a prompt takes several), and the classes they come from.

    The work that waits is what it is in an M/G/1 queue with one prompt at a time, whatever the step; a
    prompt's own step is at most a full one. So times are rather too long than too short.
    """

    capacity_req_s: float
    latency_s: float
    batch: float
    mix: ServiceMix

    def mean_wait_s(self, rate: float) -> float:
        """Seconds before a prompt's batch starts, by Pollaczek and Khinchine: rate E[S^2] / (2 (1 - load));
        infinite from full load on (Tijms, A First Course in Stochastic Models, 2003, section 9.2)."""
        load = rate / self.capacity_req_s
        if load >= 1:
            return math.inf
        return load * self.mix.second_moment / (2 * (1 - load) * self.capacity_req_s)

    def wait_tail(self, rate: float, wait_s: float) -> float:
        """Chance of waiting longer than wait_s: load * exp(-load wait_s / E[W]).

        A request waits at all with the chance `load`; those that do wait E[W] / load on average, taken as
        exponential, which is exact for exponential service and the limit for any service in heavy traffic
        (Kingman, The single server queue in heavy traffic, 1961).
        """
        load = rate / self.capacity_req_s
        if wait_s < 0 or load >= 1:
            return 1.0
        decay = 2 * (1 - load) * self.capacity_req_s / self.mix.second_moment
        return load * exp(-decay * wait_s)

    @property
    def services(self) -> list[tuple[float, float]]:
        """Share of each class, and seconds from the start of its step to its first token: the step holds the
        prompt itself and others of mean length; a longer prompt takes further steps, one after the other."""
        others, period_s = max(0.0, self.batch - 1), self.batch / self.capacity_req_s
        found = []
        for share, own in zip(self.mix.shares, self.mix.relative, strict=True):
            steps = (own + others) / self.batch
            found.append((share, self.latency_s * min(1.0, steps) + max(0.0, steps - 1) * period_s))
        return found

    def attained(self, rate: float, ttft_s: float) -> float:
        """Share of requests whose first token comes within ttft_s, waiting included."""
        return math.fsum(
            share * (1 - self.wait_tail(rate, ttft_s - service_s)) for share, service_s in self.services
        )

    def soonest_s(self, share: float) -> float:
        """Seconds within which that share of the first tokens comes where nobody waits."""
        return min(
            within
            for _, within in self.services
            if math.fsum(w for w, s in self.services if s <= within) >= share
        )

    def largest_rate(self, ttft_s: float, share: float) -> float:
        """Most requests/s at which that share of the first tokens comes within ttft_s; 0 if not even a
        request alone does.

        The share that is late, by the tail above, is convex and rises with the load, so that Newton's
        method comes down to the load in question from full load without overshooting.
        """
        per_second = 2 * self.capacity_req_s / self.mix.second_moment
        decays = [(w, per_second * (ttft_s - s)) for w, s in self.services if s <= ttft_s]
        spare = math.fsum(w for w, _ in decays) - share
        if spare <= 0:
            return 0.0
        load = 1.0
        for _ in range(_STEPS):
            tails = [(w * exp(decay * (load - 1)), decay) for w, decay in decays]
            late = math.fsum(tail for tail, _ in tails) * load
            step = (late - spare) / math.fsum(tail * (1 + decay * load) for tail, decay in tails)
            load -= step
            if step <= 1e-12 * load:
                break
        return load * self.capacity_req_s


@dataclass(frozen=True)
class DecodeQueue:
    """A decode replica that runs up to `places` requests at a time, with its time per output token when so
    many are under way, and the mean outputs of a request.

    A request that finds all places taken waits, which counts as a miss.

    tiled : whether more requests at a time may be fewer requests/s, where tpot_s jumps
    """

    places: int
    tpot_s: Callable[[float], float]
    osl: float
    tiled: bool = False

    def places_within(self, tpot_s: float | None, above: float = 0.0) -> int:
        """The most requests at a time whose tokens take at most tpot_s each, 0 if none; without a target all
        places. Perhaps 0, too, if so many would be no more than `above` requests/s."""
        if tpot_s is None:
            return self.places
        # More places are more requests/s, but for jumps.
        hopeless = above * (_JUMP if self.tiled else 1.0) * self.osl
        high, high_s = self.places, self.tpot_s(self.places)
        if high_s <= tpot_s:
            return high
        low, low_s = 1, self.tpot_s(1)
        if low_s > tpot_s:
            return 0
        # A token's time is nearly affine in the requests: what lies on the line between two numbers of them
        # is close. Where it is not, as at jumps, what is left is halved after two steps that gained little.
        wide = 0
        while (width := high - low) > 1:
            if high < hopeless * high_s:
                return 0
            on_line = low + int(width * (tpot_s - low_s) / (high_s - low_s))
            middle = (low + high) // 2 if wide > 1 else min(max(on_line, low + 1), high - 1)
            middle_s = self.tpot_s(middle)
            if middle_s <= tpot_s:
                low, low_s = middle, middle_s
            else:
                high, high_s = middle, middle_s
            wide = wide + 1 if wide < 2 and high - low > width / 2 else 0
        return low

    @property
    def capacity_req_s(self) -> float:
        """Requests/s with all places taken."""
        return self.places / (self.osl * self.tpot_s(self.places))

    def at_capacity(self, req_s: float) -> DecodeQueue:
        """The same places at so many requests/s with all of them taken: tokens take as much longer."""
        slower, tpot_s = self.capacity_req_s / req_s, self.tpot_s
        return self if slower == 1 else replace(self, tpot_s=lambda requests: slower * tpot_s(requests))

    def mean_tpot_s(self, others: float) -> float:
        """Seconds per output token of a request beside whom so many others are under way on average."""
        return self.tpot_s(min(self.places, 1 + others))

    def under_way(self, rate: float) -> float:
        """Mean requests under way: the b with b = rate osl tpot(1 + b) (Little's law; a request sees b
        others), which exceeds the places where the rate exceeds the capacity."""
        most = rate * self.osl * self.tpot_s(self.places)
        return largest(lambda b: b <= rate * self.osl * self.mean_tpot_s(b), most)

    def attained(self, rate: float, tpot_s: float | None = None) -> float:
        """Share of requests that find a place at once, and no more others than let a token take tpot_s.

        An arrival sees what there is on average (Wolff, Poisson arrivals see time averages, 1982): a Poisson
        number of others (M/G/inf, whatever the outputs' lengths).
        """
        places = self.places_within(tpot_s)
        if rate >= self.capacity_req_s or places < 1:
            return 0.0
        from scipy.special import pdtr  # Slow to import; a search without targets does without.

        return twelve_digits(float(pdtr(places - 1, self.under_way(rate))))

    def largest_rate(self, share: float) -> float:
        """Most requests/s at which that share of them find a place at once."""
        from scipy.special import gammainccinv

        others = twelve_digits(float(gammainccinv(self.places, share)))
        rate = others / (self.osl * self.mean_tpot_s(others))
        if not self.tiled:
            return rate
        # Beyond a jump, more requests under way may balance the same rate: stay below what these serve, at a
        # few numbers of them, since a search asks this very often.
        first = math.ceil(1 + others)
        step = max(1, (self.places - first) // _JUMPS)
        jumps = (n * _BEYOND for n in range(first, self.places, step))
        slowest = min(((n - 1) / (self.osl * self.tpot_s(n)) for n in jumps), default=rate)
        return min(rate, slowest, self.capacity_req_s)


def largest(holds: Callable[[float], bool], limit: float) -> float:
    """The largest x in [0, limit] up to which the condition holds (0 if it never does), by halving."""
    low, high = 0.0, limit
    if holds(high):
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
