"""The scheduler's rules, and a simple model of the workers that checks every step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from cost_model.lengths import first_kept, first_read
from runtime.kv_cache.blocks import BlockPool, prefix_digests
from runtime.kv_cache.windows import WindowedPool
from runtime.protocol.between_workers import Step
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Decode, Prefill
from runtime.worker.scheduled_request import Reservation
from runtime.worker.scheduler import Completed, Scheduler

SIZE = 4


def make(
    *,
    blocks: int = 250,
    max_batch: int = 8,
    chunk: int = 64,
    mixed: int = 16,
    stages: int = 1,
    reuse: bool = True,
    window: int | None = None,
    windowed_blocks: int = 0,
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(blocks, SIZE, reuse)
    if window is not None:
        running = stages * max(chunk, mixed)
        pool = WindowedPool(blocks, windowed_blocks, SIZE, window, running, reuse)
    scheduler = Scheduler(
        max_batch=max_batch, max_prefill_tokens=chunk, max_mixed_tokens=mixed, in_flight=stages, pool=pool
    )
    return scheduler, pool


def prompt(name: str, tokens: int = 10, *, target: str = "", max_tokens: int = 5, index: int = 0) -> Prefill:
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(2,))
    text = tuple(ord(letter) for letter in name) * tokens
    return Prefill(request_id=name, prompt=text[:tokens], sampling=sampling, target=target, index=index)


def expected(scheduler: Scheduler, pool: BlockPool, name: str, tokens: int = 10) -> None:
    text = tuple(ord(letter) for letter in name) * tokens
    digests = prefix_digests(text[:tokens], SIZE)
    blocks, cached = pool.begin(tokens, digests) or ([], 0)
    assert blocks
    scheduler.expect(Reservation(name, text[:tokens], blocks, cached, digests))


def decode(scheduler: Scheduler, name: str, max_tokens: int = 5) -> bool:
    rule = Sampling(max_tokens=max_tokens)
    return not scheduler.decode(Decode(request_id=name, last_token=9, index=1, sampling=rule))


def joined(scheduler: Scheduler, pool: BlockPool, name: str, tokens: int = 10, max_tokens: int = 5) -> None:
    expected(scheduler, pool, name, tokens)
    assert decode(scheduler, name, max_tokens)
    scheduler.landed(name)


def names(step: Step | None) -> list[str]:
    return [] if step is None else [sequence.request_id for sequence in step.sequences]


def parts(step: Step | None) -> list[tuple[str, int, int]]:
    """(request, position, tokens) of each sequence."""
    return [] if step is None else [(s.request_id, s.position, len(s.tokens)) for s in step.sequences]


def run(scheduler: Scheduler, step: Step, token: int = 9) -> Completed:
    return scheduler.complete(step.step, [token for sequence in step.sequences if sequence.samples])


def test_prompts_fill_steps_in_order_and_long_ones_go_in_chunks() -> None:
    scheduler, _ = make()
    for name in "abc":
        scheduler.prefill(prompt(name, 30, target="d"))
    scheduler.prefill(prompt("z", 100, target="d"))
    steps, sampled = [], []
    while step := scheduler.next_step():
        steps.append(parts(step))
        sampled += [sequence.request_id for sequence in step.sequences if sequence.samples]
        run(scheduler, step)
    assert steps == [
        [("a", 0, 30), ("b", 0, 30), ("c", 0, 4)],
        [("c", 4, 26), ("z", 0, 38)],
        [("z", 38, 62)],
    ]
    assert sampled == ["a", "b", "c", "z"]


def test_chunks_of_one_prompt_follow_each_other_through_a_pipeline() -> None:
    scheduler, _ = make(stages=3)
    scheduler.prefill(prompt("z", 150, target="d"))
    assert [parts(scheduler.next_step()) for _ in range(3)] == [
        [("z", 0, 64)],
        [("z", 64, 64)],
        [("z", 128, 22)],
    ]


def test_a_prompt_without_room_waits_and_holds_back_the_rest() -> None:
    scheduler, _ = make(blocks=12)
    for name, tokens in (("a", 40), ("b", 20), ("c", 5)):
        scheduler.prefill(prompt(name, tokens, target="d"))
    step = scheduler.next_step()
    assert names(step) == ["a"]
    run(scheduler, step)
    assert scheduler.next_step() is None
    assert scheduler.sent("a")
    assert names(scheduler.next_step()) == ["b", "c"]


@pytest.mark.parametrize("sent_first", [True, False])
def test_a_sent_prefill_is_freed_when_both_step_and_transfer_are_done(sent_first: bool) -> None:
    scheduler, pool = make()
    scheduler.prefill(prompt("a", target="d"))
    step = scheduler.next_step()
    if sent_first:
        assert not scheduler.sent("a")
        assert run(scheduler, step).released == ("a",)
    else:
        assert run(scheduler, step).released == ()
        assert scheduler.sent("a")
    assert pool.free == pool.blocks
    assert len(scheduler) == 0


@pytest.mark.parametrize("landed_first", [True, False])
def test_a_request_joins_when_decode_and_cache_have_come(landed_first: bool) -> None:
    scheduler, pool = make()
    expected(scheduler, pool, "a", 10)
    assert scheduler.next_step() is None
    scheduler.landed("a") if landed_first else decode(scheduler, "a")
    assert scheduler.next_step() is None
    decode(scheduler, "a") if landed_first else scheduler.landed("a")
    step = scheduler.next_step()
    assert step is not None
    (sequence,) = step.sequences
    assert (sequence.tokens, sequence.position, sequence.index) == ((9,), 10, 1)
    assert [start.request_id for start in step.starts] == ["a"]
    assert len(sequence.blocks) == 3


def test_decode_without_a_reservation_is_refused() -> None:
    scheduler, pool = make()
    assert not decode(scheduler, "a")
    joined(scheduler, pool, "a")
    assert not decode(scheduler, "a")


def test_a_request_runs_to_its_length() -> None:
    scheduler, pool = make()
    joined(scheduler, pool, "a")
    seen = []
    while step := scheduler.next_step():
        done = run(scheduler, step)
        seen += [(o.index, step.sequences[0].position, o.finish_reason) for o in done.outputs]
    assert seen == [(1, 10, ""), (2, 11, ""), (3, 12, ""), (4, 13, "length")]
    assert done.released == ("a",)
    assert pool.free == pool.blocks


def test_a_stop_token_ends_a_colocated_request_after_its_prompt() -> None:
    scheduler, _ = make()
    scheduler.prefill(prompt("a"))
    done = run(scheduler, scheduler.next_step(), token=2)
    assert done.outputs[0].finish_reason == "stop"
    assert done.released == ("a",)


def test_one_token_needs_no_target() -> None:
    scheduler, _ = make()
    scheduler.prefill(prompt("a", target="d", max_tokens=1))
    step = scheduler.next_step()
    assert step.starts[0].target == ""
    assert run(scheduler, step).released == ("a",)


def test_the_batch_is_capped_and_refilled() -> None:
    scheduler, pool = make(max_batch=2)
    for name in "abc":
        joined(scheduler, pool, name)
    step = scheduler.next_step()
    assert names(step) == ["a", "b"]
    run(scheduler, step)
    scheduler.cancel("a")
    assert names(scheduler.next_step()) == ["b", "c"]


def test_prompts_share_steps_with_decodes_in_smaller_chunks() -> None:
    scheduler, pool = make()
    joined(scheduler, pool, "d")
    scheduler.prefill(prompt("a", 40))
    steps = []
    for _ in range(4):
        step = scheduler.next_step()
        steps.append(parts(step))
        run(scheduler, step)
    assert steps == [
        [("d", 10, 1), ("a", 0, 16)],
        [("d", 11, 1), ("a", 16, 16)],
        [("d", 12, 1), ("a", 32, 8)],
        [("d", 13, 1), ("a", 40, 1)],
    ]


def test_a_pipeline_has_as_many_disjoint_steps_in_flight_as_stages() -> None:
    scheduler, pool = make(stages=3, max_batch=10)
    for name in "abcdefg":
        joined(scheduler, pool, name)
    steps = [scheduler.next_step() for _ in range(3)]
    assert [names(step) for step in steps] == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert scheduler.next_step() is None
    run(scheduler, steps[1])
    assert names(scheduler.next_step()) == ["d", "e", "f"]


def test_the_second_prompt_with_the_same_beginning_runs_only_the_rest() -> None:
    scheduler, _ = make()
    scheduler.prefill(prompt("a", 30, target="d"))
    run(scheduler, scheduler.next_step())
    again = Prefill(request_id="b", prompt=(97,) * 30, sampling=Sampling(max_tokens=4), target="")
    scheduler.prefill(again)
    step = scheduler.next_step()
    assert parts(step) == [("b", 28, 2)]
    (output,) = run(scheduler, step).outputs
    assert output.cached_tokens == 28


def test_equal_prompts_of_one_step_run_once() -> None:
    scheduler, _ = make()
    rule = Sampling(max_tokens=4)
    for name in "ab":
        scheduler.prefill(Prefill(request_id=name, prompt=tuple(range(18)), sampling=rule, target=""))
    step = scheduler.next_step()
    assert parts(step) == [("a", 0, 18), ("b", 16, 2)]
    assert step.sequences[0].blocks[:4] == step.sequences[1].blocks[:4]


def test_the_youngest_gives_way_and_comes_back_with_all_its_tokens() -> None:
    scheduler, pool = make(blocks=6, reuse=False)
    for name in "ab":
        joined(scheduler, pool, name, 8, max_tokens=12)
    rounds: list[list[tuple[str, int, int]]] = []
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while step := scheduler.next_step():
        rounds.append(parts(step))
        for output in run(scheduler, step).outputs:
            tokens[output.request_id].append(output.index)
    assert tokens == {"a": list(range(1, 12)), "b": list(range(1, 12))}
    assert scheduler.preemptions == 1
    assert ("b", 0, 12) in [part for each in rounds for part in each] or ("b", 0, 13) in [
        part for each in rounds for part in each
    ]
    assert pool.free == pool.blocks


def test_prompts_for_others_pass_own_ones_that_find_no_place_in_the_batch() -> None:
    scheduler, pool = make(max_batch=1, mixed=20)
    joined(scheduler, pool, "d")
    scheduler.prefill(prompt("own"))
    for name in "ab":
        scheduler.prefill(prompt(name, target="elsewhere"))
    step = scheduler.next_step()
    assert names(step) == ["d", "a", "b"]
    assert scheduler.growing == 1
    run(scheduler, step)
    assert scheduler.cancel("d")
    assert names(scheduler.next_step()) == ["own"]


def test_prompts_for_others_pass_own_ones_that_find_no_blocks_but_not_the_other_way_round() -> None:
    scheduler, pool = make(blocks=12, reuse=False)
    expected(scheduler, pool, "d", 20)
    scheduler.prefill(prompt("own", 32))
    scheduler.prefill(prompt("a", 20, target="elsewhere"))
    scheduler.prefill(prompt("b", 20, target="elsewhere"))
    scheduler.prefill(prompt("later", 4))
    step = scheduler.next_step()
    assert names(step) == ["a"]
    run(scheduler, step)
    assert scheduler.next_step() is None  # b finds no blocks, and what came later has to wait for it
    assert scheduler.cancel("d") and scheduler.cancel("own")
    assert names(scheduler.next_step()) == ["b", "later"]


def test_a_prompt_for_another_replica_keeps_its_blocks_when_decodes_find_none() -> None:
    """Two incoming requests outgrow the pool while a prompt for another replica is cut into chunks."""
    scheduler, pool = make(blocks=13, chunk=1, mixed=1, reuse=False)
    for name in "ab":
        joined(scheduler, pool, name, 8, max_tokens=14)
    scheduler.prefill(prompt("z", 20, target="elsewhere"))
    chunks, tokens = list[tuple[int, int]](), {"a": 1, "b": 1, "z": 0}
    while step := scheduler.next_step():
        chunks += [(first, count) for name, first, count in parts(step) if name == "z"]
        assert "z" not in step.preempted
        for output in run(scheduler, step).outputs:
            tokens[output.request_id] += 1
    assert scheduler.preemptions > 0
    assert chunks == [(k, 1) for k in range(20)]
    assert tokens == {"a": 14, "b": 14, "z": 1}
    assert scheduler.sent("z") and pool.free == pool.blocks


def test_cancel_frees_at_once_unless_a_step_or_a_transfer_is_under_way() -> None:
    scheduler, pool = make()
    scheduler.prefill(prompt("waiting"))
    assert scheduler.cancel("waiting")
    expected(scheduler, pool, "expected")
    assert scheduler.cancel("expected")
    joined(scheduler, pool, "ready")
    assert scheduler.cancel("ready")
    assert scheduler.next_step() is None
    scheduler.prefill(prompt("running"))
    step = scheduler.next_step()
    assert not scheduler.cancel("running")
    done = run(scheduler, step)
    assert (done.outputs, done.released) == ((), ("running",))
    scheduler.prefill(prompt("sending", target="d"))
    run(scheduler, scheduler.next_step())
    assert not scheduler.cancel("sending")
    assert scheduler.sent("sending")
    scheduler.prefill(prompt("z", 100, target="d"))
    run(scheduler, scheduler.next_step())
    assert not scheduler.cancel("z")  # its first chunk is still being sent
    assert scheduler.next_step() is None
    assert scheduler.sent("z")
    assert not scheduler.cancel("unknown")
    assert pool.free == pool.blocks


# -- histories


def next_token(tokens: tuple[int, ...]) -> int:
    """The model: a token that depends on all tokens before it; 2 ends a request."""
    return random.Random(hash(tokens)).choice([2, *range(10, 40)])


@dataclass
class Workers:
    """Runs steps as a replica's workers would, with a cache that knows which text each slot belongs to."""

    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)

    def fill(self, table: Sequence[int], text: tuple[int, ...], first: int, end: int) -> None:
        for token in range(first, end):
            self.slots[table[token // SIZE] * SIZE + token % SIZE] = text[: token + 1]

    def read(self, table: Sequence[int], text: tuple[int, ...], first: int, end: int) -> None:
        for token in range(first, end):
            assert self.slots[table[token // SIZE] * SIZE + token % SIZE] == text[: token + 1]

    def run(self, step: Step, window: int | None = None) -> list[int]:
        for name in step.preempted:
            del self.tables[name]
        for start in step.starts:
            assert start.request_id not in self.tables
            self.tables[start.request_id] = []
        for sequence in step.sequences:
            table = self.tables[sequence.request_id]
            table += sequence.blocks if window is None else sequence.windowed_blocks
            text, end = self.texts[sequence.request_id], sequence.position + len(sequence.tokens)
            assert list(sequence.tokens) == text[sequence.position : end]
            assert sequence.samples == (end == len(text))
            self.fill(table, tuple(text), sequence.position, end)
        drawn = []
        for sequence in step.sequences:
            text, table = tuple(self.texts[sequence.request_id]), self.tables[sequence.request_id]
            first = 0 if window is None else first_read(sequence.position, window)
            self.read(table, text, first, sequence.position + len(sequence.tokens))
            if sequence.samples:
                drawn.append(next_token(text))
        return drawn


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("seed", range(60))
def test_every_history_gives_the_tokens_of_the_model_and_frees_everything(
    seed: int, window: int | None
) -> None:
    """Prompts with common prefixes, chunks, preemptions, cancels and transfers, in a small pool; with layers
    that have a window, in two."""
    rng = random.Random(seed)
    stages, max_batch = rng.randint(1, 4), rng.randint(1, 6)
    scheduler, pool = make(
        blocks=rng.randint(16, 40),
        max_batch=max_batch,
        chunk=rng.randint(3, 40),
        mixed=rng.randint(1, 20),
        stages=stages,
        reuse=rng.random() < 0.8,
        window=window,
        windowed_blocks=random.Random(seed).randint(16, 40),
    )
    workers, windowed = Workers(), Workers()
    windowed.texts = workers.texts
    arriving = [f"r{number}" for number in range(40)]
    flying: list[Step] = []
    targets: dict[str, str] = {}
    sending: list[str] = []
    released: list[str] = []
    alive: set[str] = set()
    cancelled: set[str] = set()
    outputs: dict[str, list[int]] = {}
    limits: dict[str, int] = {}

    def take(done: Completed) -> None:
        for output in done.outputs:
            name = output.request_id
            assert name not in cancelled
            assert output.index == len(outputs[name])
            outputs[name].append(output.token)
            workers.texts[name].append(output.token)
            assert output.token == next_token(tuple(workers.texts[name][:-1]))
            assert (output.finish_reason != "") == (output.token == 2 or output.index + 1 == limits[name])
        released.extend(done.released)

    while arriving or alive:
        if arriving and rng.random() < 0.4:
            name = arriving.pop()
            text = [rng.randrange(2) + 5 for _ in range(rng.randint(1, 30))]
            limits[name], outputs[name] = rng.randint(2, 30), []
            rule = Sampling(max_tokens=limits[name], stop_token_ids=(2,))
            workers.texts[name], targets[name] = list(text), ""
            digests = prefix_digests(text, SIZE)
            arrives = rng.random() < 0.4
            begun = pool.reserve(len(text), digests, scheduler.growing, name) if arrives else None
            if begun is not None:
                blocks, cached = begun
                scheduler.expect(Reservation(name, tuple(text), blocks, cached, digests))
                workers.fill(blocks, tuple(text), cached, len(text))
                if window is not None:
                    first = max(cached, first_kept(len(text), window, SIZE))
                    windowed.fill(pool.windowed_table(name), tuple(text), first, len(text))
                first = next_token(tuple(text))
                outputs[name].append(first)
                workers.texts[name].append(first)
                scheduler.landed(name)
                assert not scheduler.decode(Decode(request_id=name, last_token=first, index=1, sampling=rule))
            else:
                targets[name] = rng.choice(["", "d"])
                scheduler.prefill(
                    Prefill(request_id=name, prompt=tuple(text), sampling=rule, target=targets[name])
                )
            alive.add(name)
        if alive and rng.random() < 0.08:
            name = rng.choice(sorted(alive - cancelled) or sorted(alive))
            cancelled.add(name)
            begun_to_send = bool(targets[name]) and name in workers.tables
            if scheduler.cancel(name):
                released.append(name)
            elif begun_to_send and name not in sending:
                sending.append(name)
        while step := scheduler.next_step():
            assert not cancelled & set(names(step))
            assert sum(targets[name] == "" for name in names(step)) <= max_batch
            flying.append(step)
        assert len(flying) <= stages
        if flying and rng.random() < 0.8:
            step = flying.pop(0)
            drawn = workers.run(step)
            assert window is None or windowed.run(step, window) == drawn
            for sequence in step.sequences:
                if sequence.samples and targets[sequence.request_id] and sequence.request_id not in sending:
                    sending.append(sequence.request_id)
            take(scheduler.complete(step.step, drawn))
        if sending and rng.random() < 0.5:
            name = sending.pop()
            if window is not None and name in scheduler and name not in cancelled:
                text = tuple(workers.texts[name][:-1])
                windowed.read(windowed.tables[name], text, first_read(len(text), window), len(text))
            if name in scheduler and scheduler.sent(name):
                released.append(name)
        alive -= set(released)
    assert sorted(released) == sorted(outputs)
    for name in set(outputs) - cancelled:
        last = outputs[name][-1]
        assert targets[name] or last == 2 or len(outputs[name]) == limits[name]
    assert pool.free == pool.blocks
    assert len(scheduler) == 0
