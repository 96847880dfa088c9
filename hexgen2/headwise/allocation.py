"""Which devices of a stage hold which KV heads of which requests, and what moves (Hetis, section 5.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hexgen2.headwise.dispatch import Load, dispatch, loads_of, time_s
from hexgen2.headwise.profile import DeviceProfile
from hexgen2.prediction.headwise_times import Line, level

THETA = 0.5
"""One request is dispatched anew if attention takes so much longer than it ideally would (section 5.3.1)."""
SPARE_TOKENS = 16
"""A device's memory is as good as exhausted if its requests find no room for so many further tokens each."""
STEPS_PER_LOOK = 4
"""Steps from one look for attention that is out of balance to the next."""
MOST_MOVES = 8
"""Requests of a stage that are dispatched anew before a step because memory is short."""
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Move:
    """A request whose heads [devices] go from `old` to `new`; those that are in both stay."""

    request: int
    old: np.ndarray
    new: np.ndarray

    @property
    def added(self) -> np.ndarray:
        """[devices] heads whose caches have to be sent there."""
        return np.maximum(self.new - self.old, 0.0)


class Allocation:
    """The heads of all requests in one stage.

    Parameters
    ----------
    profiles : of the devices, as the dispatcher believes them
    query_heads : for each KV head
    kv_heads : of a request
    head_bytes : of one token of one KV head in one layer
    capacity_bytes : [devices] memory for one layer's KV cache

    Attributes
    ----------
    held_bytes : [devices] bytes in use, with those that are kept for caches on their way
    """

    def __init__(
        self,
        profiles: Sequence[DeviceProfile],
        query_heads: int,
        kv_heads: int,
        head_bytes: float,
        capacity_bytes: Sequence[float],
    ) -> None:
        self.profiles, self._query_heads, self._kv_heads = profiles, query_heads, kv_heads
        self._head_bytes, self._capacity = head_bytes, np.array(capacity_bytes, dtype=float)
        devices = len(profiles)
        self._heads = np.zeros((64, devices))
        self._tokens = np.zeros(64)
        self._row: dict[int, int] = {}
        self._spare = list(range(63, -1, -1))
        # Moves under way, and the bytes of a head that room is kept for.
        self._moving: dict[int, Move] = {}
        self._kept: dict[int, float] = {}
        self._total = np.zeros(devices)
        self.held_bytes = np.zeros(devices)

    def __contains__(self, request: int) -> bool:
        return request in self._row

    # -- requests come, grow and go

    def has_room(self, tokens: float) -> bool:
        """Whether all heads of a request of so many tokens would find room."""
        whole = np.floor(np.maximum(self._free(), 0.0) / (tokens * self._head_bytes) + _ROUNDING)
        return float(whole.sum()) >= self._kv_heads

    def place(self, requests: dict[int, float]) -> bool:
        """Dispatch requests with so many tokens, if possible where those that are there can still grow; False
        (and nothing is placed) where memory has no room."""
        sizes = [tokens * self._head_bytes for tokens in requests.values()]
        spare = self.loads()
        for load, growth in zip(spare, self._growth_bytes().tolist(), strict=True):
            load.free_bytes = max(0.0, load.free_bytes - growth)
        split = dispatch(self.profiles, self._query_heads, self._kv_heads, spare, sizes)
        if split is None:
            split = dispatch(self.profiles, self._query_heads, self._kv_heads, self.loads(), sizes)
        if split is None:
            return False
        for j, (request, tokens) in enumerate(requests.items()):
            self._add(request, tokens, split[:, j])
        return True

    def put(self, request: int, tokens: float, heads: Sequence[float]) -> None:
        """Add a request whose heads [devices] are dispatched already."""
        self._add(request, tokens, np.asarray(heads, dtype=float))

    def limit(self, device: int, capacity_bytes: float) -> None:
        """From now on a device has memory for so many bytes of one layer's KV cache: 0 if it is lost."""
        self._capacity[device] = capacity_bytes

    def remove(self, request: int) -> None:
        """Forget a request, and what of it is under way."""
        self.cancel(request)
        row = self._row.pop(request)
        self._total -= self._heads[row]
        self.held_bytes -= self._heads[row] * (self._tokens[row] * self._head_bytes)
        self._heads[row] = 0.0
        self._spare.append(row)

    def rows(self, requests: Iterable[int]) -> np.ndarray:
        """The rows of these requests in what `heads` returns."""
        return np.array([self._row[request] for request in requests], dtype=int)

    def heads(self, rows: np.ndarray) -> np.ndarray:
        """[requests, devices] KV heads of these rows."""
        return self._heads[rows]

    def grow(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """The requests of these rows have so many tokens by now."""
        more = tokens - self._tokens[rows]
        self.held_bytes += (self._heads[rows] * more[:, None]).sum(axis=0) * self._head_bytes
        self._tokens[rows] = tokens

    # -- what should move

    def loads(self, without: int | None = None) -> list[Load]:
        """The loads of the devices, perhaps without one request."""
        heads, held = self._total, self._attended_bytes()
        free = self._free()
        if without is not None:
            row = self._row[without]
            own = self._heads[row] * (self._tokens[row] * self._head_bytes)
            heads, held, free = heads - self._heads[row], held - own, free + own
        return loads_of(self.profiles, self._query_heads, heads.tolist(), held.tolist(), free.tolist())

    def time_s(self) -> float:
        """Seconds of a layer's attention over all requests, as the dispatcher believes."""
        return time_s(self.profiles, self.loads())

    def ideal_s(self) -> float:
        """The same if all heads were divided anew, each device taking a share of every request: as little as
        the linear program over all requests gives, or a little more, but in no time."""
        held = float(self._attended_bytes().sum())
        heads = float(self._total.sum())
        lines = [
            Line(
                p.start_s,
                p.group_s(self._query_heads) * heads + p.kv_byte_s * held,
                min(1.0, float(room) / held) if held > 0 else 1.0,
            )
            for p, room in zip(self.profiles, self._capacity, strict=True)
        ]
        return level(lines)[0]

    def slow_request(self, theta: float = THETA) -> Move | None:
        """Where attention takes more than 1 + theta times the ideal: the request that takes most of the
        slowest device, dispatched anew; None if there is nothing to gain."""
        if not self._row or self.time_s() <= (1 + theta) * self.ideal_s():
            return None
        loads = self.loads()
        done = [
            p.start_s + load.seconds if load.used else 0.0
            for p, load in zip(self.profiles, loads, strict=True)
        ]
        slowest = max(range(len(done)), key=done.__getitem__)
        profile = self.profiles[slowest]
        each = profile.group_s(self._query_heads), profile.kv_byte_s * self._head_bytes
        movable = [request for request in self._row if request not in self._moving]
        if not movable:
            return None

        def taken_s(request: int) -> float:
            row = self._row[request]
            return float(self._heads[row, slowest] * (each[0] + each[1] * self._tokens[row]))

        request = max(movable, key=lambda r: (taken_s(r), r))
        move = self._anew(request, self.loads(without=request))
        return move if move is not None and self._time_after(move) < max(done) * (1 - 1e-6) else None

    def crowded_request(self) -> Move | None:
        """Where a device has no room for SPARE_TOKENS of each request on it and others have: the request that
        came last of those on it, dispatched so that there is room; None if none is exhausted, or no move
        helps."""
        needed, free = self._growth_bytes(), self._free_soon()
        for device in np.flatnonzero((free < needed) & (self._total > 0)).tolist():
            there = [
                r for r, row in self._row.items() if self._heads[row, device] > 0 and r not in self._moving
            ]
            if not there:
                continue
            request = there[-1]
            loads = self.loads(without=request)
            for i, load in enumerate(loads):
                load.free_bytes = max(0.0, load.free_bytes - needed[i])
            move = self._anew(request, loads)
            if move is not None and move.new[device] < move.old[device]:
                return move
        return None

    def overfull_requests(self) -> list[int]:
        """The requests on devices that hold more than they can, the one that came last first."""
        over = self._free() < -_ROUNDING * self._capacity
        if not over.any():
            return []
        return [r for r, row in reversed(self._row.items()) if self._heads[row, over].any()]

    def begin(self, move: Move) -> float:
        """Keep room for the caches that move; returns how many bytes a layer has to send."""
        row = self._row[move.request]
        self._moving[move.request] = move
        self._kept[move.request] = float(self._tokens[row] * self._head_bytes)
        self.held_bytes += move.added * self._kept[move.request]
        return float(move.added.sum()) * self._kept[move.request]

    def finish(self, move: Move) -> bool:
        """The caches have arrived; False if the request is gone, or the move was cancelled."""
        if self._moving.get(move.request) is not move:
            return False
        self.cancel(move.request)
        row = self._row[move.request]
        self._total += move.new - move.old
        self.held_bytes += (move.new - move.old) * (self._tokens[row] * self._head_bytes)
        self._heads[row] = move.new
        return True

    def cancel(self, request: int) -> None:
        """Give back the room that is kept for a request that moves."""
        move = self._moving.pop(request, None)
        if move is not None:
            self.held_bytes -= move.added * self._kept.pop(request)

    def _anew(self, request: int, loads: Sequence[Load]) -> Move | None:
        row = self._row[request]
        size = [float(self._tokens[row] * self._head_bytes)]
        split = dispatch(self.profiles, self._query_heads, self._kv_heads, loads, size)
        if split is None or (split[:, 0] == self._heads[row]).all():
            return None
        return Move(request, self._heads[row].copy(), split[:, 0])

    def _time_after(self, move: Move) -> float:
        loads = self.loads(without=move.request)
        size = float(self._tokens[self._row[move.request]] * self._head_bytes)
        for load, profile, heads in zip(loads, self.profiles, move.new.tolist(), strict=True):
            load.seconds += heads * (profile.group_s(self._query_heads) + profile.kv_byte_s * size)
            load.used = load.used or heads > 0
        return time_s(self.profiles, loads)

    def _growth_bytes(self) -> np.ndarray:
        """[devices] what SPARE_TOKENS further tokens of each request would take."""
        return np.asarray(self._total * (SPARE_TOKENS * self._head_bytes))

    def _free_soon(self) -> np.ndarray:
        """[devices] free bytes when all moves under way have ended."""
        free = self._free()
        for request, move in self._moving.items():
            size = self._tokens[self._row[request]] * self._head_bytes
            free = free + np.maximum(move.old - move.new, 0.0) * size
        return free

    def _add(self, request: int, tokens: float, heads: np.ndarray) -> None:
        if not self._spare:
            size = len(self._tokens)
            self._heads = np.concatenate([self._heads, np.zeros_like(self._heads)])
            self._tokens = np.concatenate([self._tokens, np.zeros(size)])
            self._spare = list(range(2 * size - 1, size - 1, -1))
        row = self._row[request] = self._spare.pop()
        self._heads[row], self._tokens[row] = heads, tokens
        self._total += heads
        self.held_bytes += heads * (tokens * self._head_bytes)

    def _attended_bytes(self) -> np.ndarray:
        """[devices] bytes of caches that attention reads: those on their way are not read there."""
        kept = [move.added * self._kept[request] for request, move in self._moving.items()]
        return self.held_bytes - sum(kept, np.zeros(len(self._capacity)))

    def _free(self) -> np.ndarray:
        return self._capacity - self.held_bytes
