"""Replicas that prefill for each other, in little memory: every request ends, however full both are.

The front end's admission and accounts are real, and so are the schedulers and their block pools. Messages and
KV caches between them arrive in a random order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from runtime.kv_cache.blocks import BlockPool, prefix_digests
from runtime.protocol.between_workers import Step
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Decode, Prefill
from runtime.routing.admission import Admission
from runtime.routing.fair_queue import FirstCome
from runtime.routing.kv_budget import KvBudget
from runtime.routing.router import Route, Router
from runtime.worker.scheduled_request import Reservation
from runtime.worker.scheduler import Scheduler

BLOCK = 4
MIXED = ("a", "b", "c")
ENDS = [*((p, d) for p in MIXED for d in MIXED), ("p", "a"), ("p", "b"), ("a", "d")]
"""All pairs of three mixed replicas, two routes of a prefill replica and one to a decode replica."""


@dataclass(eq=False)
class Asked:
    """A request, and the attempt to serve it that is under way."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    route: Route | None = None
    attempt: str = ""
    holders: set[str] = field(default_factory=set)
    made: int = 0
    ended: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def capacity_tokens(self) -> int:
        return len(self.prompt) + self.max_tokens

    @property
    def one_token(self) -> bool:
        return self.max_tokens == 1


class Node:
    """A replica without workers: its steps take no time and their tokens are all 9."""

    def __init__(self, tokens: int, max_batch: int, stages: int, reuse: bool) -> None:
        self.pool = BlockPool(tokens // BLOCK, BLOCK, reuse)
        self.scheduler = Scheduler(
            max_batch=max_batch, max_prefill_tokens=12, max_mixed_tokens=5, in_flight=stages, pool=self.pool
        )
        self.flying: list[Step] = []


class Fleet:
    """The front end and its replicas."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.nodes, self.accounts = dict[str, Node](), dict[str, KvBudget]()
        alike = rng.random() < 0.4
        tokens, max_batch = BLOCK * rng.randint(8, 24), rng.randint(2, 12)
        for name in ("p", *MIXED, "d"):
            if not alike:
                tokens, max_batch = BLOCK * rng.randint(8, 24), rng.randint(2, 12)
            self.nodes[name] = Node(tokens, max_batch, rng.randint(1, 3), rng.random() < 0.2)
            growth = 0 if name == "p" else rng.choice([0, 0, 3])
            outgoing = rng.choice([None, tokens // 2]) if name in MIXED else None
            rounding = BLOCK - 1 if name in MIXED else 0
            self.accounts[name] = KvBudget(
                tokens, max_batch, growth, outgoing_tokens=outgoing, rounding_tokens=rounding
            )
        if alike:
            routes = [Route("a", "b", 1.0), Route("b", "a", 1.0)]
        else:
            some = rng.sample(ENDS, rng.randint(3, len(ENDS)))
            routes = [Route(*ends, rng.choice([0.0, 0.2, 1.0, 3.0])) for ends in some]
        self.admission = Admission(Router(routes), self.accounts, FirstCome(10**6))
        self.by_attempt: dict[str, Asked] = {}
        self.refusals = self.attempts = 0
        self.sending: list[str] = []

    def start_waiting(self) -> None:
        while (found := self.admission.next()) is not None:
            self._begin(*found)

    def _begin(self, asked: Asked, route: Route) -> None:
        self.attempts += 1
        asked.route, asked.attempt = route, f"{asked.name}.{self.attempts}"
        self.by_attempt[asked.attempt] = asked
        alone = route.colocated or asked.one_token
        asked.holders = {route.prefill} if alone else {route.prefill, route.decode}
        size = asked.prompt_tokens
        self.accounts[route.prefill].hold(asked.attempt, size, "" if alone else route.decode)
        if alone:
            self._prefill(asked, "")
        elif self._reserved(asked):
            self.accounts[route.decode].hold(asked.attempt, size)
            self._prefill(asked, route.decode)
        else:  # as InFlight does when it is refused
            self.refusals += 1
            self.accounts[route.prefill].release(asked.attempt)
            assert self.accounts[route.decode].held, "an idle replica refuses"
            self.accounts[route.decode].refused = True
            del self.by_attempt[asked.attempt]
            self.admission.put_back(asked)

    def _reserved(self, asked: Asked) -> bool:
        node, text = self.nodes[asked.route.decode], asked.prompt
        digests = prefix_digests(text, BLOCK) if node.pool.reuse else []
        begun = node.pool.begin(len(text), digests, node.scheduler.growing)
        if begun is not None:
            node.scheduler.expect(Reservation(asked.attempt, text, *begun, digests))
        return begun is not None

    def _prefill(self, asked: Asked, target: str) -> None:
        rule = Sampling(max_tokens=asked.max_tokens)
        message = Prefill(request_id=asked.attempt, prompt=asked.prompt, sampling=rule, target=target)
        self.nodes[asked.route.prefill].scheduler.prefill(message)

    def advance(self) -> bool:
        """One random event; False if there is none."""
        able = [name for name, node in self.nodes.items() if self._fly(node)]
        choices = [*able, *["send"] * len(self.sending)]
        if not choices:
            return False
        chosen = self.rng.choice(choices)
        if chosen == "send":
            attempt = self.sending.pop(self.rng.randrange(len(self.sending)))
            asked = self.by_attempt[attempt]
            self.nodes[asked.route.decode].scheduler.landed(attempt)
            if self.nodes[asked.route.prefill].scheduler.sent(attempt):
                self._released(attempt, asked.route.prefill)
        else:
            self._complete(chosen)
        return True

    def _fly(self, node: Node) -> bool:
        while step := node.scheduler.next_step():
            node.flying.append(step)
        assert not node.scheduler.take_faults()
        return bool(node.flying)

    def _complete(self, name: str) -> None:
        node = self.nodes[name]
        step = node.flying.pop(0)
        done = node.scheduler.complete(step.step, [9 for each in step.sequences if each.samples])
        for output in done.outputs:
            asked = self.by_attempt[output.request_id]
            assert output.index == asked.made
            asked.made += 1
            asked.ended = bool(output.finish_reason)
            side = asked.route.prefill if asked.one_token else asked.route.decode
            self.accounts[side].grow(asked.attempt)
            if name != side:
                rule = Sampling(max_tokens=asked.max_tokens)
                decode = Decode(request_id=asked.attempt, last_token=9, index=1, sampling=rule)
                assert not self.nodes[side].scheduler.decode(decode)
                self.sending.append(asked.attempt)
        for attempt in done.released:
            self._released(attempt, name)

    def _released(self, attempt: str, name: str) -> None:
        self.accounts[name].release(attempt)
        self.by_attempt[attempt].holders.discard(name)
        self.start_waiting()


@pytest.mark.parametrize("seed", range(80))
def test_replicas_that_send_to_each_other_never_wait_for_each_other(seed: int) -> None:
    fleet = Fleet(seed)
    rng, requests = fleet.rng, list[Asked]()
    sizes = rng.choice([[1], [1, 5, 9], range(1, 21)])  # one token takes a block, too
    outputs = rng.choice([[8], [1, 2, 8, 20]])
    for number in range(80):
        text = tuple(rng.choice([5, 5, 5, number]) for _ in range(rng.choice(sizes)))
        asked = Asked(f"r{number}", text, rng.choice(outputs))
        if fleet.admission.can_ever_start(asked):
            requests.append(asked)
            fleet.admission.enqueue(asked)
    fleet.start_waiting()
    while fleet.advance():
        pass
    assert len(requests) > 50
    assert all(asked.ended and asked.made == asked.max_tokens and not asked.holders for asked in requests)
    assert not any(account.held_tokens or account.held for account in fleet.accounts.values())
    assert all(node.pool.free == node.pool.blocks for node in fleet.nodes.values())


def test_two_full_replicas_exchange_their_requests() -> None:
    """a holds a KV cache that b is to send and b one that a is to send; both have a request of their own that
    finds no memory any more, and would wait for it in front of the prompt that the other waits for."""
    nodes = {name: Node(tokens=12 * BLOCK, max_batch=4, stages=1, reuse=False) for name in "ab"}
    rule = Sampling(max_tokens=30)
    for name, node in nodes.items():
        own = Prefill(request_id=f"{name}'s own", prompt=(5,) * 4, sampling=rule, target="")
        node.scheduler.prefill(own)
        step = node.scheduler.next_step()
        node.scheduler.complete(step.step, [9])
        begun = node.pool.begin(24, [], node.scheduler.growing)
        node.scheduler.expect(Reservation(f"to {name}", (6,) * 24, *begun, []))
    for name, other in ("ab", "ba"):
        scheduler = nodes[name].scheduler
        while scheduler.preemptions == 0:  # until the own one has outgrown what is left
            step = scheduler.next_step()
            if step is None:
                break
            scheduler.complete(step.step, [9])
        sent = Prefill(request_id=f"to {other}", prompt=(6,) * 24, sampling=rule, target=other)
        scheduler.prefill(sent)
    for name, other in ("ab", "ba"):
        scheduler, tokens = nodes[name].scheduler, 0
        while step := scheduler.next_step():
            samples = [9 for each in step.sequences if each.samples]
            tokens += sum(len(s.tokens) for s in step.sequences if s.request_id == f"to {other}")
            scheduler.complete(step.step, samples)
        assert tokens == 24
