"""Hetis's Dispatcher: which devices take which KV heads of new requests (SC 2025, section 5.2).

min max over devices i of  start_i + sum over requests j of (group_i + byte_i b_j) x_ij + load_i
with x_ij whole KV heads (each with its r query heads), sum over i of x_ij = K, and
sum over j of b_j x_ij within the free memory of device i; b_j are the bytes of one KV head of request j.

Several requests are a linear program (solved by HiGHS), whose solution is made whole. One request is a
min-max allocation of equal units to devices whose times only rise, for which the greedy choice is optimal
(Ibaraki and Katoh, Resource Allocation Problems, 1988, section 5.2).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from hexgen2.headwise.profile import DeviceProfile

_EXACT = 1e-9
CLASSES = 24
"""Of more requests, those nearest in length are divided alike, which takes half the time: the optimum for 64
is within a few millionths."""
NEAR, EXCHANGES = 0.01, 24
"""Whole heads are evened out until the slowest device is so close to the linear program, by at most so many
exchanges."""
_TINY_S = 1e-30
_UNIT_S = 1e-6
"""Seconds are given to the solver in microseconds."""


@dataclass
class Load:
    """What a device has to do by now: the seconds of a layer, and the bytes of a layer's KV cache that are
    free; `used` if it has any heads, so that its start is paid."""

    seconds: float
    free_bytes: float
    used: bool


def loads_of(
    profiles: Sequence[DeviceProfile],
    query_heads: int,
    heads: Sequence[float],
    kv_bytes: Sequence[float],
    free_bytes: Sequence[float],
) -> list[Load]:
    """The loads of devices with so many KV heads and bytes of their caches over all requests."""
    return [
        Load(p.group_s(query_heads) * h + p.kv_byte_s * b, free, h > 0)
        for p, h, b, free in zip(profiles, heads, kv_bytes, free_bytes, strict=True)
    ]


def time_s(profiles: Sequence[DeviceProfile], loads: Sequence[Load]) -> float:
    """Seconds of a layer's attention: of the slowest device."""
    return max(
        (p.start_s + own.seconds for p, own in zip(profiles, loads, strict=True) if own.used), default=0.0
    )


def dispatch(
    profiles: Sequence[DeviceProfile],
    query_heads: int,
    kv_heads: int,
    loads: Sequence[Load],
    head_bytes: Sequence[float],
) -> np.ndarray | None:
    """[devices, requests] KV heads of each request on each device; None where memory has no room.

    Parameters
    ----------
    query_heads : for each KV head
    kv_heads : of a request, K
    head_bytes : b_j, of each request
    """
    if len(head_bytes) > 1:
        for most in sorted({min(CLASSES, len(head_bytes)), len(head_bytes)}):
            part = _linear(profiles, query_heads, kv_heads, loads, head_bytes, most)
            if part is not None:
                return _whole(profiles, query_heads, kv_heads, loads, head_bytes, part)
    return _one_by_one(profiles, query_heads, kv_heads, loads, head_bytes)


def _one_by_one(
    profiles: Sequence[DeviceProfile],
    query_heads: int,
    kv_heads: int,
    loads: Sequence[Load],
    head_bytes: Sequence[float],
) -> np.ndarray | None:
    """The requests one after the other, longest first, each by the greedy choice."""
    found = np.zeros((len(profiles), len(head_bytes)))
    left = _Devices(profiles, query_heads, loads)
    for j in sorted(range(len(head_bytes)), key=lambda j: (-head_bytes[j], j)):
        for _ in range(kv_heads):
            i = left.soonest(head_bytes[j])
            if i is None:
                return None
            left.take(i, head_bytes[j])
            found[i, j] += 1
    return found


class _Devices:
    """What devices have to do while heads are given out."""

    def __init__(self, profiles: Sequence[DeviceProfile], query_heads: int, loads: Sequence[Load]) -> None:
        self._start = [p.start_s for p in profiles]
        self._group = [p.group_s(query_heads) for p in profiles]
        self._byte = [p.kv_byte_s for p in profiles]
        self._load = [load.seconds for load in loads]
        self._free = [load.free_bytes for load in loads]
        self._first = list(self._load)

    def soonest(self, head_bytes: float) -> int | None:
        """The device that has done all of its work soonest with one more KV head; None if no memory has room
        for it."""
        best, best_s = None, math.inf
        for i, free in enumerate(self._free):
            if free < head_bytes * (1 - _EXACT):
                continue
            seconds = self._start[i] + self._load[i] + self._group[i] + self._byte[i] * head_bytes
            if seconds < best_s * (1 - _EXACT):
                best, best_s = i, seconds
        return best

    def done_s(self, found: np.ndarray, head_bytes: Sequence[float]) -> float:
        """Seconds of the slowest device with these heads [devices, requests], parts of heads included."""
        heads, held = found.sum(axis=1), (found * np.asarray(head_bytes)).sum(axis=1)
        devices = zip(
            self._start, self._first, self._group, heads.tolist(), self._byte, held.tolist(), strict=True
        )
        return max(
            start + load + group * h + byte * b for start, load, group, h, byte, b in devices if load or h
        )

    def even_out(self, found: np.ndarray, size: np.ndarray, goal_s: float) -> None:
        """Exchange heads between the slowest device and others, one for one or one for none, as long as the
        slower of the two is done sooner and the slowest misses goal_s by more than NEAR."""
        start, group = np.array(self._start), np.array(self._group)
        byte, load, free = np.array(self._byte), np.array(self._load), np.array(self._free)
        sizes = np.append(size, 0.0)  # The last stands for no head.
        heads = np.append(np.ones(len(size)), 0.0)
        for _ in range(EXCHANGES):
            done = np.where(load > 0, start + load, 0.0)
            slow = int(done.argmax())
            if done[slow] <= goal_s * (1 + NEAR):
                return
            given = np.flatnonzero(found[slow])
            best: tuple[int, int, int] | None = None
            best_s = done[slow] * (1 - 1e-6)
            for other in range(len(start)):
                if other == slow:
                    continue
                back = np.append(np.flatnonzero(found[other]), len(size))
                more = sizes[given][:, None] - sizes[back][None, :]
                count = heads[given][:, None] - heads[back][None, :]
                fits = (more <= free[other] * (1 + _EXACT)) & (-more <= free[slow] * (1 + _EXACT))
                mine = done[slow] - group[slow] * count - byte[slow] * more
                theirs = start[other] + load[other] + group[other] * count + byte[other] * more
                later = np.where(fits, np.maximum(mine, theirs), np.inf)
                at = int(later.argmin())
                if later.flat[at] < best_s:
                    best_s = float(later.flat[at])
                    best = other, int(given[at // len(back)]), int(back[at % len(back)])
            if best is None:
                return
            other, go, come = best
            found[slow, go] -= 1
            found[other, go] += 1
            if come < len(size):
                found[slow, come] += 1
                found[other, come] -= 1
            count, more = 1.0 - heads[come], sizes[go] - sizes[come]
            for i, sign in ((slow, -1), (other, 1)):
                load[i] += sign * (group[i] * count + byte[i] * more)
                free[i] -= sign * more

    def take(self, i: int, head_bytes: float, count: float = 1.0) -> None:
        """Give so many KV heads to a device."""
        self._load[i] += count * (self._group[i] + self._byte[i] * head_bytes)
        self._free[i] -= count * head_bytes


def _whole(
    profiles: Sequence[DeviceProfile],
    query_heads: int,
    kv_heads: int,
    loads: Sequence[Load],
    head_bytes: Sequence[float],
    part: np.ndarray,
) -> np.ndarray | None:
    """Whole heads from a solution in parts: what is whole stays, and what is left goes to the device that is
    done soonest."""
    found = np.floor(part + 1e-6)
    left = _Devices(profiles, query_heads, loads)
    for i, j in zip(*np.nonzero(found), strict=True):
        left.take(int(i), head_bytes[j], float(found[i, j]))
    missing = kv_heads - found.sum(axis=0)
    for j in sorted(np.flatnonzero(missing).tolist(), key=lambda j: (-head_bytes[j], j)):
        for _ in range(int(missing[j])):
            i = left.soonest(head_bytes[j])
            if i is None:
                return None
            left.take(i, head_bytes[j])
            found[i, j] += 1
    left.even_out(found, np.asarray(head_bytes), left.done_s(part, head_bytes))
    return found


def _linear(
    profiles: Sequence[DeviceProfile],
    query_heads: int,
    kv_heads: int,
    loads: Sequence[Load],
    head_bytes: Sequence[float],
    most: int,
) -> np.ndarray | None:
    """The optimum where heads can be divided, of up to so many classes of requests, on the devices that are
    worth their start; None where the requests of a class do not fit together, so that there is no start."""
    devices = _worth_it(profiles, query_heads, kv_heads, loads, np.asarray(head_bytes))
    # Requests of a class are divided alike; its head is the sum of theirs.
    by_size = np.argsort(np.asarray(head_bytes), kind="stable")
    classes = np.array_split(by_size, most)
    whole = np.array([math.fsum(head_bytes[j] for j in members) for members in classes])
    members_of = np.array([float(len(members)) for members in classes])
    count, size = len(devices), len(whole)
    group = np.array([profiles[i].group_s(query_heads) for i in devices])
    byte = np.array([profiles[i].kv_byte_s for i in devices])
    base = np.array([profiles[i].start_s + loads[i].seconds for i in devices]) / _UNIT_S
    free = np.array([loads[i].free_bytes for i in devices])
    take = (group[:, None] * members_of[None, :] + byte[:, None] * whole[None, :]) / _UNIT_S
    unit = float(whole.max())
    start = _start(take * kv_heads, base, whole * kv_heads, free)
    if start is None:
        return None
    # Rows: the time of each device, its memory if that may run out, the heads of each request. Columns: x by
    # device, then T.
    columns, limited = count * size + 1, np.flatnonzero(free < float(whole.sum()) * kv_heads)
    cost = np.zeros(columns)
    cost[-1] = 1.0
    memory, full = whole / unit, np.full(size, float(kv_heads))
    index = np.arange(count * size, dtype=np.int32).reshape(count, size)
    times = np.concatenate([take, np.full((count, 1), -1.0)], axis=1).ravel()
    timed = np.concatenate([index, np.full((count, 1), columns - 1, dtype=np.int32)], axis=1).ravel()
    lengths = [0] + [size + 1] * count + [size] * len(limited) + [count] * size
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, count + len(limited) + size
    lp.col_cost_, lp.col_lower_ = cost, np.zeros(columns)
    lp.col_upper_ = np.full(columns, highspy.kHighsInf)
    lp.row_lower_ = np.concatenate([np.full(count + len(limited), -highspy.kHighsInf), full])
    lp.row_upper_ = np.concatenate([-base, free[limited] / unit, full])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum(lengths, dtype=np.int32)
    lp.a_matrix_.index_ = np.concatenate([timed, index[limited].ravel(), index.T.ravel()])
    lp.a_matrix_.value_ = np.concatenate([times, np.tile(memory, len(limited)), np.ones(count * size)])
    solver = _solver()
    solver.passModel(lp)
    solver.setBasis(_basis(*start, count, count + len(limited), size))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    found = np.zeros((len(profiles), len(head_bytes)))
    split = np.asarray(solver.getSolution().col_value)[:-1].reshape(count, size)
    for members, column in zip(classes, split.T, strict=True):
        found[np.array(devices)[:, None], members[None, :]] = column[:, None]
    return found


def _worth_it(
    profiles: Sequence[DeviceProfile],
    query_heads: int,
    kv_heads: int,
    loads: Sequence[Load],
    head_bytes: np.ndarray,
) -> list[int]:
    """The devices that have heads already, or would be done before the others if these took everything."""
    total, count = float(head_bytes.sum()) * kv_heads, len(head_bytes) * kv_heads
    order = sorted(range(len(profiles)), key=lambda i: (profiles[i].start_s + loads[i].seconds, i))
    chosen = [i for i in order if loads[i].used]
    for i in order:
        if loads[i].used:
            continue
        if chosen and math.fsum(loads[k].free_bytes for k in chosen) >= total:
            # At this time the chosen ones have done all, if heads could be divided at will.
            full = [
                max(_TINY_S, profiles[k].group_s(query_heads) * count + profiles[k].kv_byte_s * total)
                for k in chosen
            ]
            base = [profiles[k].start_s + loads[k].seconds for k in chosen]
            inverse = math.fsum(1 / f for f in full)
            done_s = (1 + math.fsum(b / f for b, f in zip(base, full, strict=True))) / inverse
            if profiles[i].start_s + loads[i].seconds >= done_s:
                continue
        chosen.append(i)
    return sorted(chosen)


def _start(
    take: np.ndarray, base: np.ndarray, size: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, int] | None:
    """Each request whole on the device that is done soonest, longest first, and the slowest device then: a
    feasible vertex. None where memory is too small for that."""
    load, left = base.copy(), free.copy()
    where = np.zeros(len(size), dtype=int)
    for j in np.argsort(-size, kind="stable").tolist():
        done = np.where(left >= size[j], load + take[:, j], np.inf)
        i = int(done.argmin())
        if not done[i] < np.inf:
            return None
        where[j], load[i] = i, done[i]
        left[i] -= size[j]
    return where, int(load.argmax())


def _basis(where: np.ndarray, slowest: int, count: int, limits: int, size: int) -> highspy.HighsBasis:
    """The basis of a start: `limits` rows are times and memories."""
    status = highspy.HighsBasisStatus
    columns = [status.kLower] * (count * size) + [status.kBasic]
    for j, i in enumerate(where.tolist()):
        columns[i * size + j] = status.kBasic
    rows = [status.kBasic] * limits + [status.kLower] * size
    rows[slowest] = status.kUpper
    basis = highspy.HighsBasis()
    basis.col_status, basis.row_status, basis.valid = columns, rows, True
    return basis


_SOLVERS = threading.local()
_OPTIONS = {
    "output_flag": False,
    "presolve": "off",
    "threads": 1,
    "simplex_strategy": 4,  # Primal: the start is feasible.
    "simplex_scale_strategy": 0,
}


def _solver() -> highspy.Highs:
    """This thread's solver: making one takes as long as solving."""
    if not hasattr(_SOLVERS, "solver"):
        _SOLVERS.solver = highspy.Highs()
        for name, value in _OPTIONS.items():
            _SOLVERS.solver.setOptionValue(name, value)
    solver: highspy.Highs = _SOLVERS.solver
    return solver
