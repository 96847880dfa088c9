"""One request in the scheduler: its tokens, its state and the blocks of KV cache that it holds."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from runtime.kv_cache.blocks import BlockPool, Digest, prefix_digests
from runtime.protocol.between_workers import SequenceStart
from runtime.protocol.message import Sampling


class State(enum.Enum):
    """Where a request is on its way through the scheduler."""

    EXPECTED = "its KV cache or its Decode is still to come"
    WAITING = "it has no blocks yet, or gave them up"
    JOINING = "it could decode and waits for room in the batch"
    RUNNING = "it takes part in steps"
    SENDING = "its prompt has run, its KV cache is being sent"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks taken for a prompt whose KV cache will arrive; that of the first `cached_tokens` is here."""

    request_id: str
    prompt: tuple[int, ...]
    blocks: list[int]
    cached_tokens: int
    digests: list[Digest]


@dataclass(slots=True)
class ScheduledRequest:
    """A request of the scheduler.

    Attributes
    ----------
    tokens : all tokens so far, the client's `prompt_tokens` first
    arrival : number of the request in the order of arrival
    index : index of the next output token
    target, target_tokens : the replica that decodes ("": this one), and how many tokens' KV cache it has
    computed : leading tokens whose keys and values are in the blocks once the steps in flight are done
    cached_tokens : of these, how many another request had computed at the start
    published : leading blocks that other requests may share
    blocks_sent : leading blocks that the executors know
    introduced : the executors know the request
    steps : steps in flight that it takes part in
    landed, sent : all of its KV cache has arrived, or was sent
    spoiled : part of its KV cache is lost: it gives its blocks up once it takes part in no step in flight
    """

    request_id: str
    state: State
    tokens: list[int]
    prompt_tokens: int
    arrival: int
    index: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    target: str = ""
    target_tokens: int = 0
    computed: int = 0
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    published: int = 0
    blocks_sent: int = 0
    introduced: bool = False
    steps: int = 0
    landed: bool = False
    sent: bool = False
    cancelled: bool = False
    spoiled: bool = False

    @property
    def to_run(self) -> int:
        """Tokens that have not been computed."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether it produces a token per step, so that a long prompt in the same step would delay it."""
        return self.to_run <= 1 and not self.target and len(self.tokens) > self.prompt_tokens

    def take_blocks(self, pool: BlockPool, spare: int) -> bool:
        """Take blocks for all tokens, sharing those that are computed already; False, and nothing taken, if
        fewer than `spare` blocks would stay free."""
        size = pool.block_tokens
        if pool.reuse:
            self.digests = prefix_digests(self.tokens, size, self.digests)
        shared = self.digests[: (len(self.tokens) - 1) // size]
        begun = pool.begin(len(self.tokens), shared, spare, self.request_id)
        if begun is None:
            return False
        self.blocks, self.computed = begun
        self.published = self.computed // size
        if not self.index:
            self.cached_tokens = self.computed
        return True

    def give_up_blocks(self, pool: BlockPool) -> None:
        """Release all blocks; the tokens are to be computed again."""
        pool.release(self.blocks, self.request_id)
        self.blocks = []
        self.computed = self.blocks_sent = self.published = 0
        self.spoiled = False

    def publish(self, pool: BlockPool, computed: int) -> None:
        """Let others share the blocks that are full once `computed` tokens are. Steps run in the order in
        which they are made, so those in flight count."""
        full = computed // pool.block_tokens
        if not pool.reuse or full == self.published:
            return
        self.digests = prefix_digests(self.tokens, pool.block_tokens, self.digests)
        for number in range(self.published, full):
            pool.publish(self.blocks[number], self.digests[number], self.request_id, number)
        self.published = full

    def introduction(self) -> SequenceStart:
        """What the executors learn of it once, with its first step."""
        return SequenceStart(
            request_id=self.request_id,
            sampling=self.sampling,
            history=tuple(self.tokens) if self.sampling.needs_history else (),
            prompt_tokens=self.prompt_tokens,
            target=self.target,
            target_tokens=self.target_tokens,
            end_token=len(self.tokens),
        )
