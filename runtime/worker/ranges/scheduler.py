"""Which requests run in the next step of a range of layers: those whose tokens have arrived.

No step waits for more. It takes an equal share of the requests that decode, one for each hop of their path:
with all of them, requests that met once would stay together for good, and most replicas would idle (as in
hexgen2/simulator/ranges/node.py). Beside them run prompts, or the next pieces of these.

The front end promises no more KV cache than there is, so blocks are taken as tokens arrive. This is
bookkeeping only; the driver's thread owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from runtime.kv_cache.blocks import BlockPool
from runtime.protocol.between_workers import ActivationPart, SequenceStart, SequenceStep, Step
from runtime.protocol.to_workers import JoinPath, NextToken
from runtime.worker.ranges.activations import Piece


@dataclass(slots=True)
class Visit:
    """A request on this replica: its hop, how many of its tokens have arrived, its blocks, of which the
    executors know the first, and whether they know it at all."""

    hop: JoinPath
    arrived: int = 0
    blocks: list[int] = field(default_factory=list)
    blocks_sent: int = 0
    introduced: bool = False


class RangeScheduler:
    """Makes the steps of one replica that holds a range of layers.

    Parameters
    ----------
    max_prompt_tokens : prompt tokens in one step
    max_mixed_tokens : prompt tokens in one step that also decodes
    pool : blocks of the KV cache, each of which holds tokens in all layers of the range; those with a window
        may have others

    Attributes
    ----------
    visits : by request
    """

    def __init__(self, max_prompt_tokens: int, max_mixed_tokens: int, pool: BlockPool) -> None:
        self._max_prompt_tokens, self._max_mixed_tokens = max_prompt_tokens, max_mixed_tokens
        self._pool = pool
        self.visits: dict[str, Visit] = {}
        self._decodes: deque[Piece] = deque()
        self._prompts: deque[Piece] = deque()
        self._early: list[Piece] = []
        self._faults: dict[str, str] = {}
        self._last_number = -1
        self._next_step = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.visits

    def join(self, hop: JoinPath, now_s: float) -> None:
        """Add a request; at its first hop, all of its tokens have arrived."""
        self.visits[hop.request_id] = Visit(hop)
        self._last_number = hop.number
        if not hop.first_layer:
            self._arrive_here(hop, hop.tokens, 0, hop.index, now_s)
        early, self._early = self._early, []
        self.arrive(early)

    def next_token(self, message: NextToken, now_s: float) -> None:
        """Run another token of a request, at its first hop; unknown requests are ignored."""
        visit = self.visits.get(message.request_id)
        if visit is not None:
            self._arrive_here(visit.hop, (message.token,), message.position, message.index, now_s)

    def _arrive_here(
        self, hop: JoinPath, tokens: tuple[int, ...], position: int, index: int, now_s: float
    ) -> None:
        part = ActivationPart(
            request_id=hop.request_id,
            number=hop.number,
            tokens=tokens,
            position=position,
            index=index,
            samples=True,
        )
        self.arrive([Piece(part, None, now_s)])

    def arrive(self, pieces: Iterable[Piece]) -> None:
        """Take what has come from the hop before. That of paths which this worker has yet to join waits, and
        that of paths which it has left is dropped."""
        for piece in pieces:
            part, visit = piece.part, self.visits.get(piece.part.request_id)
            if visit is not None and part.position != visit.arrived:
                missing = f"tokens {visit.arrived} to {part.position} of it did not arrive"
                self._faults[part.request_id] = missing
            elif visit is not None:
                visit.arrived += len(part.tokens)
                (self._decodes if part.index > visit.hop.index else self._prompts).append(piece)
            elif part.number > self._last_number:
                self._early.append(piece)

    def leave(self, request_id: str) -> bool:
        """Forget a request; False if it is not here."""
        visit = self.visits.pop(request_id, None)
        if visit is None:
            return False
        for waiting in (self._decodes, self._prompts):
            for piece in [piece for piece in waiting if piece.part.request_id == request_id]:
                waiting.remove(piece)
        if visit.blocks:
            self._pool.release(visit.blocks, request_id)
        return True

    def ran(self, pieces: Iterable[Piece]) -> None:
        """Note that a step has run with these."""
        for piece in pieces:
            part = piece.part
            self._pool.passed(part.request_id, part.position + len(part.tokens), True)

    def take_faults(self) -> dict[str, str]:
        """Requests that could not be put into a step since the last call, and why. The caller must fail
        them."""
        faults, self._faults = self._faults, {}
        return faults

    def next_step(self) -> tuple[Step, list[Piece]] | None:
        """The next step to run and what its sequences came with; None while nothing has arrived."""
        chosen = [self._decodes.popleft() for _ in range(self._share())]
        left = self._max_mixed_tokens if chosen else self._max_prompt_tokens
        begun = False
        while self._prompts and left > 0:
            piece = self._prompts[0]
            count = len(piece.part.tokens)
            if count > left and piece.rows is None:
                piece, self._prompts[0] = _cut(piece, left)
            elif count > left and begun:
                break
            else:
                self._prompts.popleft()
            chosen.append(piece)
            begun, left = True, left - count
        chosen = [piece for piece in chosen if self._has_blocks(piece.part)]
        sound = [piece for piece in chosen if piece.part.request_id not in self._faults]
        return self._issue(sound) if sound else None

    def _share(self) -> int:
        """How many of the waiting decodes the next step takes."""
        if not self._decodes:
            return 0
        hops = self.visits[self._decodes[0].part.request_id].hop.hops
        return min(len(self._decodes), -(-len(self.visits) // hops))

    def _has_blocks(self, part: ActivationPart) -> bool:
        """Take the blocks that a piece needs; if there are none, its request fails."""
        request_id, end, visit = (
            part.request_id,
            part.position + len(part.tokens),
            self.visits[part.request_id],
        )
        missing = self._pool.blocks_for(end) - len(visit.blocks)
        if missing > 0:
            if visit.blocks:
                blocks = self._pool.allocate(missing, owner=request_id)
            else:
                blocks, _ = self._pool.begin(end, (), owner=request_id) or (None, 0)
            if blocks is None:
                self._faults[request_id] = f"there are no {missing} free blocks of KV cache for it"
                return False
            visit.blocks += blocks
        if self._pool.extend(request_id, end) < end:
            self._faults[request_id] = "there are no free blocks of KV cache for its layers with a window"
            return False
        return True

    def _issue(self, pieces: list[Piece]) -> tuple[Step, list[Piece]]:
        """A step of these, in order of the layer at which they enter."""
        step, self._next_step = self._next_step, self._next_step + 1
        pieces = sorted(pieces, key=lambda piece: self.visits[piece.part.request_id].hop.first_layer)
        starts, sequences = list[SequenceStart](), list[SequenceStep]()
        for piece in pieces:
            part = piece.part
            visit = self.visits[part.request_id]
            hop = visit.hop
            if not visit.introduced:
                starts.append(_introduction(hop))
                visit.introduced = True
            sequences.append(
                SequenceStep(
                    request_id=part.request_id,
                    tokens=part.tokens,
                    position=part.position,
                    index=part.index,
                    samples=part.samples and not hop.next_worker,
                    blocks=tuple(visit.blocks[visit.blocks_sent :]),
                    windowed_blocks=self._pool.unsent(part.request_id),
                    first_layer=hop.first_layer,
                )
            )
            visit.blocks_sent = len(visit.blocks)
        return Step(step=step, starts=tuple(starts), sequences=tuple(sequences)), pieces


def _introduction(hop: JoinPath) -> SequenceStart:
    """What the executors learn of a request with its first step here."""
    return SequenceStart(
        request_id=hop.request_id,
        sampling=hop.sampling,
        history=hop.tokens if hop.sampling.needs_history else (),
        prompt_tokens=max(len(hop.tokens) - hop.index, 0),
    )


def _cut(piece: Piece, count: int) -> tuple[Piece, Piece]:
    """The first `count` tokens of a prompt at its first hop, and the rest."""
    part = piece.part
    first = msgspec.structs.replace(part, tokens=part.tokens[:count], samples=False)
    rest = msgspec.structs.replace(part, tokens=part.tokens[count:], position=part.position + count)
    return Piece(first, None, piece.arrived_s), Piece(rest, None, piece.arrived_s)
