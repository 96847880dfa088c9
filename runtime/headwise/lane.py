"""The KV heads of one worker of a stage: which device holds which head of which request, and what moves.

The dispatcher (hexgen2/headwise/) says how many heads of a request each device takes; here they get blocks,
and a head that is dispatched anew moves: its cache is copied, some of it before each step, while attention
goes on where it is. Between two steps the head switches over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hexgen2.headwise.allocation import MOST_MOVES, Allocation, Move
from hexgen2.headwise.profile import DeviceProfile
from runtime.kv_cache.blocks import BlockPool
from runtime.protocol.between_workers import HeadGrant, HeadHaul
from runtime.protocol.to_workers import HeadLane


@dataclass(slots=True)
class _Head:
    """Where a head is: its device and blocks, of which the executors know the first `told`."""

    device: int
    blocks: list[int]
    told: int = 0

    def untold(self) -> tuple[int, ...]:
        """The blocks that the executors do not know; they are told now."""
        blocks, self.told = tuple(self.blocks[self.told :]), len(self.blocks)
        return blocks


@dataclass(slots=True)
class _Haul:
    """A request whose heads are on their way: where each will be, and how many tokens of it are there."""

    move: Move
    coming: dict[int, _Head]
    copied: dict[int, int] = field(default_factory=dict)


class Lane:
    """The account of one lane, in the driver. Requests are numbered.

    Parameters
    ----------
    number : of the lane, in the order of the replica's ranks
    block_tokens : tokens of a block, which holds one head of one request

    Attributes
    ----------
    redispatches : requests that were dispatched anew
    hauled_tokens : tokens of single heads that were copied for these
    """

    def __init__(self, number: int, lane: HeadLane, block_tokens: int) -> None:
        self._number, self._lane, self._size = number, lane, block_tokens
        self._bytes = lane.head_bytes * block_tokens
        self._pools = [BlockPool(each.blocks, block_tokens, reuse=False) for each in lane.devices]
        self._allocation = Allocation(
            [DeviceProfile(*each.profile) for each in lane.devices],
            lane.query_heads,
            lane.heads,
            lane.head_bytes,
            [each.blocks * self._bytes for each in lane.devices],
        )
        self._heads: dict[int, list[_Head]] = {}
        self._hauls: dict[int, _Haul] = {}
        self._lost = set[int]()
        self.redispatches = self.hauled_tokens = 0

    @property
    def free(self) -> int:
        """Blocks for all heads that are free, if these could be divided at will."""
        free = (pool.free for d, pool in enumerate(self._pools) if d not in self._lost)
        return sum(free) // self._lane.heads

    def free_of(self, device: int) -> int:
        """Free blocks of a device."""
        return self._pools[device].free

    def heads_on(self) -> Counter[int]:
        """Heads of all requests, by device."""
        return Counter(head.device for heads in self._heads.values() for head in heads)

    def devices_of(self, request: int) -> set[int]:
        """The devices that hold heads of a request, or are to hold them."""
        heads = list(self._heads.get(request, ()))
        if haul := self._hauls.get(request):
            heads += haul.coming.values()
        return {head.device for head in heads}

    def believe(self, profiles: Sequence[DeviceProfile]) -> None:
        """Dispatch by these profiles of the devices from now on."""
        self._allocation.profiles = list(profiles)

    # -- requests come, grow and go

    def take(self, request: int, blocks: int) -> bool:
        """Dispatch the heads of a request of so many blocks each; False, and nothing taken, without room."""
        if not self._allocation.place({request: float(blocks * self._size)}):
            return False
        if self._give_blocks(request, blocks):
            return True
        self._allocation.remove(request)
        return False

    def dispatch_together(self, requests: Sequence[int]) -> None:
        """Dispatch requests, of which the executors know nothing, by one linear program over all."""
        allocation, sizes = self._allocation, {r: len(self._heads[r][0].blocks) for r in requests}
        before = {r: allocation.heads(allocation.rows([r]))[0].copy() for r in requests}
        for request in requests:
            self._take_blocks_back(request)
            allocation.remove(request)
        tokens = {r: float(blocks * self._size) for r, blocks in sizes.items()}
        if allocation.place(tokens):
            given = [r for r in requests if self._give_blocks(r, sizes[r])]
            if len(given) == len(requests):
                return
            for request in given:
                self._take_blocks_back(request)
            for request in requests:
                allocation.remove(request)
        for request in requests:
            allocation.put(request, tokens[request], before[request])
            self._give_blocks(request, sizes[request])

    def can_grow(self, request: int) -> bool:
        """Whether each head of a request can get another block on its device."""
        needed = Counter(head.device for head in self._heads[request])
        return all(self._pools[device].free >= count for device, count in needed.items())

    def is_short_for(self, request: int) -> set[int]:
        """The devices that have no further block for each head of a request there."""
        needed = Counter(head.device for head in self._heads[request])
        return {device for device, count in needed.items() if self._pools[device].free < count}

    def grow(self, request: int) -> None:
        """Give each head of a request another block; one that moves stays, if there is none where it goes."""
        heads = self._heads[request]
        for head in heads:
            head.blocks += self._pools[head.device].allocate(1) or []
        rows = self._allocation.rows([request])
        self._allocation.grow(rows, np.array([float(len(heads[0].blocks) * self._size)]))
        for coming in list(self._hauls[request].coming.values()) if request in self._hauls else ():
            block = self._pools[coming.device].allocate(1)
            if block is None:
                self._cancel(request)
                break
            coming.blocks += block

    def leave(self, request: int) -> None:
        """Free all blocks of a request."""
        self._cancel(request)
        self._take_blocks_back(request)
        self._allocation.remove(request)

    def _give_blocks(self, request: int, blocks: int) -> bool:
        counts = self._allocation.heads(self._allocation.rows([request]))[0].tolist()
        heads = self._heads[request] = list[_Head]()
        for device, count in enumerate(counts):
            for _ in range(round(count)):
                given = self._pools[device].allocate(blocks)
                if given is None:
                    self._take_blocks_back(request)
                    return False
                heads.append(_Head(device, given))
        return True

    def _take_blocks_back(self, request: int) -> None:
        for head in self._heads.pop(request):
            self._pools[head.device].release(head.blocks)

    # -- devices that are lost and come back

    def lose(self, device: int) -> None:
        """Count on a device no more. The requests that it holds heads of have to leave."""
        self._lost.add(device)
        self._allocation.limit(device, 0.0)

    def regain(self, device: int) -> None:
        """Use a device again that was lost."""
        self._lost.discard(device)
        self._allocation.limit(device, self._lane.devices[device].blocks * self._bytes)

    # -- what moves

    def look(self, theta: float | None, leaving: Collection[int]) -> None:
        """Dispatch requests anew where memory is short and, with theta, where attention takes more than
        1 + theta times the ideal. Those that leave anyway stay."""
        for _ in range(MOST_MOVES):
            if not self._begin(self._allocation.crowded_request(), leaving):
                break
        if theta is not None:
            self._begin(self._allocation.slow_request(theta), leaving)

    def _begin(self, move: Move | None, leaving: Collection[int]) -> bool:
        if move is None or move.request in leaving:
            return False
        heads, surplus = self._heads[move.request], Counter[int]()
        wanted = [d for d, count in enumerate(move.added.tolist()) for _ in range(round(count))]
        for device, count in enumerate((move.old - move.new).tolist()):
            surplus[device] = max(0, round(count))
        coming = dict[int, _Head]()
        for number, head in enumerate(heads):
            if surplus[head.device] and wanted:
                blocks = self._pools[wanted[-1]].allocate(len(head.blocks))
                if blocks is None:
                    self._free(coming.values())
                    return False
                surplus[head.device] -= 1
                coming[number] = _Head(wanted.pop(), blocks)
        self._allocation.begin(move)
        self._hauls[move.request] = _Haul(move, coming, dict.fromkeys(coming, 0))
        self.redispatches += 1
        return True

    def _free(self, heads: Collection[_Head]) -> None:
        for head in heads:
            self._pools[head.device].release(head.blocks)

    def _cancel(self, request: int) -> None:
        """Let the heads of a request that have not switched over stay where they are."""
        haul = self._hauls.pop(request, None)
        if haul is None:
            return
        self._free(haul.coming.values())
        if len(haul.coming) < len(haul.copied):  # some have switched over
            self._allocation.remove(request)
            counts = Counter(head.device for head in self._heads[request])
            devices = range(len(self._pools))
            tokens = float(len(self._heads[request][0].blocks) * self._size)
            self._allocation.put(request, tokens, [float(counts[d]) for d in devices])
        else:
            self._allocation.cancel(request)

    # -- what the executors are told

    def hauls(self, names: dict[int, str], computed: dict[int, int], most_tokens: int) -> Iterator[HeadHaul]:
        """What is to be copied before the next step, at most so many tokens of single heads.

        Parameters
        ----------
        names : of the requests
        computed : tokens whose keys and values are in the cache, by request
        """
        for request, haul in list(self._hauls.items()):
            upto = computed[request]
            for number, coming in list(haul.coming.items()):
                first = haul.copied[number]
                end = min(upto, first + most_tokens)
                if first == end < upto:
                    return
                most_tokens -= end - first
                self.hauled_tokens += end - first
                haul.copied[number] = end
                head = self._heads[request][number]
                if upto:  # else nobody knows of it yet
                    yield HeadHaul(
                        request_id=names[request],
                        lane=self._number,
                        head=number,
                        source=head.device,
                        target=coming.device,
                        first_token=first,
                        end_token=end,
                        blocks=coming.untold(),
                        switches=end == upto,
                    )
                if end == upto:
                    self._pools[head.device].release(head.blocks)
                    self._heads[request][number] = haul.coming.pop(number)
            if not haul.coming:
                del self._hauls[request]
                self._allocation.finish(haul.move)

    def grants(self, request: int, name: str) -> Iterator[HeadGrant]:
        """The blocks of a request that the executors do not know."""
        for number, head in enumerate(self._heads[request]):
            if len(head.blocks) > head.told:
                yield HeadGrant(
                    request_id=name,
                    lane=self._number,
                    head=number,
                    device=head.device,
                    blocks=head.untold(),
                )
