"""The KV cache of a replica with attention workers, as its driver hands it out: blocks of single heads.

To the scheduler it is a pool of blocks like any other. It dispatches heads when a request takes blocks, looks
before each step for heads that should move, and adds to the step what the executors have to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec

from hexgen2.headwise.allocation import STEPS_PER_LOOK
from hexgen2.headwise.profile import DeviceProfile
from runtime.headwise.lane import Lane
from runtime.headwise.room import largest_tokens
from runtime.kv_cache.blocks import BlockPool, Digest
from runtime.protocol.between_workers import HeadGrant, HeadHaul, Step
from runtime.protocol.from_workers import HeadCounts
from runtime.protocol.to_workers import Configure

HAULED_BYTES = 4 * 2**20
"""KV cache of a lane that is copied before a step, so that the step is not held up."""
FEWEST_TOKENS = 64
"""Tokens of single heads that are copied before a step, however large they are: more than it adds."""


class HeadPool(BlockPool):
    """Blocks of a whole replica: a request's n-th block has the same tokens of all heads, each on a device of
    its lane. Blocks are not shared between requests. One thread uses it.

    Parameters
    ----------
    token_bytes : of one head in one layer, in the cache

    Attributes
    ----------
    away : attention workers that hold nothing now, because some lane's connection to them is gone
    recomputed : requests that were computed again because of that; the driver counts them
    """

    def __init__(self, config: Configure, token_bytes: int) -> None:
        self._shapes, size = config.lanes, config.block_tokens
        super().__init__(largest_tokens(config.lanes, size) // size, size, reuse=False)
        self._lanes = [Lane(number, lane, size) for number, lane in enumerate(config.lanes)]
        self._theta, self._looked = config.theta, 0
        self._most_tokens = [
            max(FEWEST_TOKENS, HAULED_BYTES // (lane.layers * token_bytes)) for lane in config.lanes
        ]
        self._token_bytes = [lane.layers * token_bytes for lane in config.lanes]
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._begun = 0
        self._computed: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._leaving = set[int]()
        self._broken: dict[str, set[str]] = {}
        self._dispatched = Counter[str]()
        self.recomputed = 0

    # -- what the scheduler asks, as of any pool

    @property
    def free(self) -> int:
        return min(lane.free for lane in self._lanes)

    def fits(self, tokens: int) -> bool:
        """Whether the devices that are left hold a request of so many tokens when nothing else is there."""
        return tokens <= largest_tokens(self._shapes, self.block_tokens, self.away)

    def begin(
        self, tokens: int, digests: Sequence[Digest], spare: int = 0, owner: str = ""
    ) -> tuple[list[int], int] | None:
        blocks = self.blocks_for(tokens)
        if self.free < blocks + spare:
            return None
        number, self._begun = self._begun, self._begun + 1
        for k, lane in enumerate(self._lanes):
            if not lane.take(number, blocks):
                for taken in self._lanes[:k]:
                    taken.leave(number)
                return None
        self._numbers[owner], self._names[number] = number, owner
        self._sizes[number], self._computed[number] = blocks, 0
        return list(range(blocks)), 0

    def allocate(self, count: int, spare: int = 0, owner: str = "") -> list[int] | None:
        number = self._numbers[owner]
        first = self._sizes[number]
        for _ in range(count):
            if not all(lane.can_grow(number) for lane in self._lanes):
                return None
            for lane in self._lanes:
                lane.grow(number)
            self._sizes[number] += 1
        return list(range(first, self._sizes[number]))

    def helps(self, victim: str, owner: str) -> bool:
        other, own = self._numbers[victim], self._numbers[owner]
        return victim == owner or any(lane.is_short_for(own) & lane.devices_of(other) for lane in self._lanes)

    def release(self, blocks: Iterable[int], owner: str = "") -> None:
        number = self._numbers.pop(owner, None)
        if number is None:
            return
        for lane in self._lanes:
            lane.leave(number)
        del self._names[number], self._sizes[number], self._computed[number]
        self._leaving.discard(number)

    # -- attention workers that are lost and come back

    @property
    def away(self) -> Collection[str]:
        return {name for name, lanes in self._broken.items() if lanes}

    def lose(self, lane: str, attention_worker: str) -> list[str]:
        """A lane's connection to an attention worker is gone: dispatch nothing there.

        Returns
        -------
        the requests with heads there, which have to be computed again
        """
        self._broken.setdefault(attention_worker, set()).add(lane)
        found = dict[int, None]()
        for account, device in self._devices(attention_worker):
            account.lose(device)
            found |= dict.fromkeys(n for n in self._names if device in account.devices_of(n))
        lost = [number for number in found if number not in self._leaving]
        self._leaving.update(lost)
        return [self._names[number] for number in lost]

    def regain(self, lane: str, attention_worker: str) -> None:
        """A lane is connected again; once all are, heads are dispatched there."""
        broken = self._broken.get(attention_worker, set())
        broken.discard(lane)
        if not broken:
            for account, device in self._devices(attention_worker):
                account.regain(device)

    def believe(self, lane: str, profiles: Iterable[tuple[float, ...]]) -> None:
        """Dispatch the heads of a lane by these profiles of its devices from now on."""
        for account, shape in zip(self._lanes, self._shapes, strict=True):
            if shape.worker == lane:
                account.believe([DeviceProfile(*numbers) for numbers in profiles])

    def _devices(self, attention_worker: str) -> list[tuple[Lane, int]]:
        """A worker's number among the devices of each lane that it is one of."""
        return [
            (account, number)
            for account, lane in zip(self._lanes, self._shapes, strict=True)
            for number, device in enumerate(lane.devices)
            if device.worker == attention_worker
        ]

    # -- steps

    def attach(self, step: Step) -> Step:
        """The step, with the heads that get blocks or move before it."""
        begun = [self._numbers[start.request_id] for start in step.starts]
        for lane in self._lanes if len(begun) > 1 else ():
            lane.dispatch_together(begun)
        for sequence in step.sequences:
            self._computed[self._numbers[sequence.request_id]] = sequence.position
        self._looked += 1
        theta = self._theta if self._looked % STEPS_PER_LOOK == 0 else None
        hauls, grants = list[HeadHaul](), list[HeadGrant]()
        for lane, most_tokens in zip(self._lanes, self._most_tokens, strict=True):
            lane.look(theta, self._leaving)
            hauls += lane.hauls(self._names, self._computed, most_tokens)
            for sequence in step.sequences:
                grants += lane.grants(self._numbers[sequence.request_id], sequence.request_id)
        for sequence in step.sequences:
            number = self._numbers[sequence.request_id]
            self._computed[number] = sequence.position + len(sequence.tokens)
        self._count(step, grants)
        return msgspec.structs.replace(step, grants=tuple(grants), hauls=tuple(hauls))

    def _count(self, step: Step, grants: Iterable[HeadGrant]) -> None:
        begun = {start.request_id for start in step.starts}
        for grant in grants:
            if grant.request_id in begun and grant.device:
                self._dispatched[self._shapes[grant.lane].devices[grant.device].worker] += 1

    def counts(self) -> HeadCounts:
        """What has been done with heads so far."""
        heads, free = Counter[str](), Counter[str]()
        for account, lane in zip(self._lanes, self._shapes, strict=True):
            there = account.heads_on()
            for number, device in list(enumerate(lane.devices))[1:]:
                heads[device.worker] += there[number]
                free[device.worker] += account.free_of(number)
        hauled = (
            lane.hauled_tokens * size for lane, size in zip(self._lanes, self._token_bytes, strict=True)
        )
        return HeadCounts(
            heads=dict(heads),
            free_blocks=dict(free),
            dispatched=dict(self._dispatched),
            redispatches=sum(lane.redispatches for lane in self._lanes),
            hauled_bytes=sum(hauled),
            recomputed=self.recomputed,
            away=tuple(sorted(self.away)),
        )
