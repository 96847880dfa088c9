"""The scheduler's rules, without an engine."""

from __future__ import annotations

import random

import pytest

from runtime.engine.budget import TokenBudget
from runtime.engine.scheduler import Completed, Scheduler
from runtime.messages import Decode, Expect, Prefill, Sampling, Step


def make(*, budget: int = 1000, max_batch: int = 8, max_prefill_tokens: int = 64, stages: int = 1) -> tuple:
    room = TokenBudget(budget)
    scheduler = Scheduler(
        max_batch=max_batch, max_prefill_tokens=max_prefill_tokens, stages=stages, budget=room
    )
    return scheduler, room


def prompt(name: str, tokens: int = 10, *, target: str = "", max_tokens: int = 5, index: int = 0) -> Prefill:
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(2,))
    return Prefill(request_id=name, prompt=(7,) * tokens, sampling=sampling, target=target, index=index)


def expected(scheduler: Scheduler, room: TokenBudget, name: str, tokens: int = 10) -> None:
    assert room.take(name, tokens + 5)
    scheduler.expect(Expect(request_id=name, prompt_tokens=tokens, capacity_tokens=tokens + 5))


def decode(scheduler: Scheduler, name: str, max_tokens: int = 5) -> bool:
    rule = Sampling(max_tokens=max_tokens)
    return not scheduler.decode(Decode(request_id=name, last_token=9, index=1, sampling=rule))


def joined(scheduler: Scheduler, room: TokenBudget, name: str) -> None:
    expected(scheduler, room, name)
    assert decode(scheduler, name)
    scheduler.landed(name)


def names(step: Step | None) -> list[str]:
    return [] if step is None else [sequence.request_id for sequence in step.sequences]


def run(scheduler: Scheduler, step: Step, token: int = 9) -> Completed:
    return scheduler.complete(step.step, (token,) * len(step.sequences))


def test_prompts_are_batched_in_order_up_to_the_token_limit() -> None:
    scheduler, _ = make()
    for name in "abc":
        scheduler.prefill(prompt(name, 30, target="d"))
    scheduler.prefill(prompt("long", 300, target="d"))
    steps = []
    while step := scheduler.next_step():
        steps.append(names(step))
        run(scheduler, step)
    assert steps == [["a", "b"], ["c"], ["long"]]


def test_a_prompt_without_room_waits_and_holds_back_the_rest() -> None:
    scheduler, _room = make(budget=50)
    scheduler.prefill(prompt("a", 40, target="d"))
    scheduler.prefill(prompt("b", 20, target="d"))
    scheduler.prefill(prompt("c", 5, target="d"))
    step = scheduler.next_step()
    assert names(step) == ["a"]
    run(scheduler, step)
    assert scheduler.next_step() is None
    assert scheduler.sent("a")
    assert names(scheduler.next_step()) == ["b", "c"]


@pytest.mark.parametrize("sent_first", [True, False])
def test_a_sent_prefill_is_freed_when_both_step_and_transfer_are_done(sent_first: bool) -> None:
    scheduler, room = make()
    scheduler.prefill(prompt("a", target="d"))
    step = scheduler.next_step()
    if sent_first:
        assert not scheduler.sent("a")
        assert run(scheduler, step).released == ("a",)
    else:
        assert run(scheduler, step).released == ()
        assert scheduler.sent("a")
    assert room.free == room.tokens
    assert len(scheduler) == 0


@pytest.mark.parametrize("landed_first", [True, False])
def test_a_request_joins_when_decode_and_cache_have_come(landed_first: bool) -> None:
    scheduler, room = make()
    expected(scheduler, room, "a", 10)
    assert scheduler.next_step() is None
    scheduler.landed("a") if landed_first else decode(scheduler, "a")
    assert scheduler.next_step() is None
    decode(scheduler, "a") if landed_first else scheduler.landed("a")
    step = scheduler.next_step()
    assert step is not None and step.phase == "decode"
    (sequence,) = step.sequences
    assert (sequence.tokens, sequence.position, sequence.index) == ((9,), 10, 1)


def test_decode_without_a_reservation_is_refused() -> None:
    scheduler, _ = make()
    assert not decode(scheduler, "a")


def test_a_request_that_may_outgrow_its_room_is_refused() -> None:
    scheduler, room = make()
    expected(scheduler, room, "a")
    assert not decode(scheduler, "a", max_tokens=7)
    assert decode(scheduler, "a", max_tokens=6)


def test_a_request_runs_to_its_length() -> None:
    scheduler, room = make()
    joined(scheduler, room, "a")
    seen = []
    while step := scheduler.next_step():
        done = run(scheduler, step)
        seen += [(o.index, step.sequences[0].position, o.finish_reason) for o in done.outputs]
    assert seen == [(1, 10, ""), (2, 11, ""), (3, 12, ""), (4, 13, "length")]
    assert done.released == ("a",)
    assert room.free == room.tokens


def test_a_stop_token_ends_a_colocated_request_after_its_prompt() -> None:
    scheduler, _room = make()
    scheduler.prefill(prompt("a"))
    done = run(scheduler, scheduler.next_step(), token=2)
    assert done.outputs[0].finish_reason == "stop"
    assert done.released == ("a",)


def test_one_token_needs_no_target() -> None:
    scheduler, _room = make()
    scheduler.prefill(prompt("a", target="d", max_tokens=1))
    step = scheduler.next_step()
    assert step.sequences[0].target == ""
    assert run(scheduler, step).released == ("a",)


def test_the_batch_is_capped_and_refilled() -> None:
    scheduler, room = make(max_batch=2)
    for name in "abc":
        joined(scheduler, room, name)
    step = scheduler.next_step()
    assert names(step) == ["a", "b"]
    run(scheduler, step)
    scheduler.cancel("a")
    assert names(scheduler.next_step()) == ["b", "c"]


def test_colocated_prompts_wait_for_room_in_the_batch() -> None:
    scheduler, _room = make(max_batch=2)
    for name in "abc":
        scheduler.prefill(prompt(name))
    step = scheduler.next_step()
    assert names(step) == ["a", "b"]
    run(scheduler, step)
    step = scheduler.next_step()
    assert step.phase == "decode"


def test_prompts_and_decodes_alternate() -> None:
    scheduler, room = make(max_prefill_tokens=10)
    joined(scheduler, room, "d")
    for name in "abc":
        scheduler.prefill(prompt(name, target="x"))
    phases = []
    for _ in range(5):
        step = scheduler.next_step()
        phases.append(step.phase)
        run(scheduler, step)
    assert phases == ["prefill", "decode", "prefill", "decode", "prefill"]


def test_a_pipeline_has_as_many_disjoint_steps_in_flight_as_stages() -> None:
    scheduler, room = make(stages=3, max_batch=10)
    for name in "abcdefg":
        joined(scheduler, room, name)
    steps = [scheduler.next_step() for _ in range(3)]
    assert [names(step) for step in steps] == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert scheduler.next_step() is None
    run(scheduler, steps[1])
    assert names(scheduler.next_step()) == ["d", "e", "f"]


def test_cancel_frees_at_once_unless_a_step_or_a_transfer_is_under_way() -> None:
    scheduler, room = make()
    scheduler.prefill(prompt("waiting"))
    assert scheduler.cancel("waiting")
    expected(scheduler, room, "expected")
    assert scheduler.cancel("expected")
    joined(scheduler, room, "ready")
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
    assert not scheduler.cancel("unknown")
    assert room.free == room.tokens


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_end_with_nothing_held(seed: int) -> None:
    rng = random.Random(seed)
    stages, max_batch = rng.randint(1, 4), rng.randint(1, 6)
    scheduler, room = make(budget=120, max_batch=max_batch, max_prefill_tokens=30, stages=stages)
    arriving = [f"r{number}" for number in range(60)]
    flying: list[Step] = []
    sending: list[str] = []
    released: list[str] = []
    alive: set[str] = set()
    while arriving or alive:
        if arriving and rng.random() < 0.4:
            name = arriving.pop()
            alive.add(name)
            if rng.random() < 0.4 and room.take(name, 15):
                scheduler.expect(Expect(request_id=name, prompt_tokens=10, capacity_tokens=15))
                scheduler.landed(name)
                assert decode(scheduler, name)
            else:
                scheduler.prefill(prompt(name, rng.randint(1, 40), target=rng.choice(["", "d"])))
        if alive and rng.random() < 0.1:
            name = rng.choice(sorted(alive))
            if scheduler.cancel(name):
                released.append(name)
        while step := scheduler.next_step():
            busy = {name for other in flying for name in names(other)}
            assert not busy & set(names(step))
            assert sum(not sequence.target for sequence in step.sequences) <= max_batch
            flying.append(step)
        assert len(flying) <= stages
        assert 0 <= room.free <= room.tokens
        if flying and rng.random() < 0.7:
            step = flying.pop(0)
            sending += [sequence.request_id for sequence in step.sequences if sequence.target]
            released += run(scheduler, step, token=rng.choice([2, 9, 9, 9])).released
        if sending and rng.random() < 0.5:
            name = sending.pop()
            if scheduler.sent(name):
                released.append(name)
        alive -= set(released)
    assert sorted(released) == sorted(f"r{number}" for number in range(60))
    assert room.free == room.tokens
    assert len(scheduler) == 0
