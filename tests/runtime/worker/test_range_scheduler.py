"""The steps of a range of layers: what has arrived, in equal shares, in order, within blocks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from runtime.kv_cache.blocks import BlockPool
from runtime.kv_cache.windows import WindowedPool
from runtime.protocol.between_workers import ActivationPart
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import JoinPath, NextToken
from runtime.worker.ranges.activations import Piece
from runtime.worker.ranges.scheduler import RangeScheduler

BLOCKS, SIZE = 12, 4


def scheduler(max_prompt_tokens=16, max_mixed_tokens=8, blocks=BLOCKS):
    pool = BlockPool(blocks, SIZE, reuse=False)
    return RangeScheduler(max_prompt_tokens, max_mixed_tokens, pool), pool


def joining(name, number=0, tokens=(), first_layer=0, hops=2, next_worker="n", **sampling):
    return JoinPath(
        request_id=name,
        number=number,
        first_layer=first_layer,
        hops=hops,
        next_worker=next_worker,
        sampling=Sampling(**sampling),
        index=0,
        tokens=tuple(tokens),
    )


def piece(name, tokens, position=0, number=0, index=0, samples=True):
    part = ActivationPart(
        request_id=name, number=number, tokens=tuple(tokens), position=position, index=index, samples=samples
    )
    return Piece(part, memoryview(bytes(len(tokens))), 0.0)


def ran(step):
    return [(each.request_id, each.position, len(each.tokens)) for each in step[0].sequences]


def test_a_prompt_runs_in_pieces_and_the_tokens_after_it_one_by_one():
    made, pool = scheduler()
    made.join(joining("a", tokens=range(20)), 0.0)
    first, second = made.next_step(), made.next_step()
    assert ran(first) == [("a", 0, 16)] and ran(second) == [("a", 16, 4)]
    assert [own.part.samples for step in (first, second) for own in step[1]] == [False, True]
    assert [len(step[0].starts) for step in (first, second)] == [1, 0]
    assert made.next_step() is None
    made.next_token(NextToken(request_id="a", token=7, position=20, index=1), 0.0)
    (step, pieces) = made.next_step()
    assert ran((step, pieces)) == [("a", 20, 1)] and pieces[0].part.index == 1
    assert pool.free == BLOCKS - 6
    assert made.leave("a") and not made.leave("a") and pool.free == BLOCKS


def test_steps_take_equal_shares_of_those_that_decode_and_no_more_than_has_arrived():
    made, _ = scheduler(blocks=100)
    for number in range(6):
        made.join(joining(f"r{number}", number, tokens=(1,), hops=3), 0.0)
    sizes = []
    while (step := made.next_step()) is not None:
        sizes.append(len(step[0].sequences))
    assert sizes == [6]  # prompts of one token each
    for number in range(5):
        made.next_token(NextToken(request_id=f"r{number}", token=1, position=1, index=1), 0.0)
    seen = []
    while (step := made.next_step()) is not None:
        seen.append([name for name, _, _ in ran(step)])
    assert seen == [["r0", "r1"], ["r2", "r3"], ["r4"]]


def test_prompts_run_beside_decodes_even_when_they_are_long():
    made, _ = scheduler()
    made.join(joining("a", 0, tokens=(1, 2)), 0.0)
    made.next_step()
    made.join(joining("b", 1, first_layer=1), 0.0)
    made.arrive([piece("b", range(12), number=1), piece("b", range(12, 15), 12, number=1)])
    made.next_token(NextToken(request_id="a", token=1, position=2, index=1), 0.0)
    assert ran(made.next_step()) == [("a", 2, 1), ("b", 0, 12)]
    assert ran(made.next_step()) == [("b", 12, 3)]


def test_a_last_piece_of_one_token_does_not_pass_the_pieces_before_it():
    made, _ = scheduler(max_prompt_tokens=4)
    made.join(joining("a", first_layer=2, next_worker=""), 0.0)
    made.arrive([piece("a", range(4), samples=False), piece("a", (4,), 4)])
    assert ran(made.next_step()) == [("a", 0, 4)] and ran(made.next_step()) == [("a", 4, 1)]


def test_sequences_come_in_the_order_in_which_they_enter():
    made, _ = scheduler()
    for number, layer in enumerate((3, 1, 2, 1)):
        made.join(joining(f"r{number}", number, first_layer=layer), 0.0)
        made.arrive([piece(f"r{number}", (1, 2), number=number)])
    step, pieces = made.next_step()
    assert [each.first_layer for each in step.sequences] == [1, 1, 2, 3]
    assert [each.part.request_id for each in pieces] == [each.request_id for each in step.sequences]


def test_only_the_end_of_a_path_samples_and_learns_the_history():
    made, _ = scheduler()
    made.join(joining("a", 0, tokens=(1, 2, 3), next_worker="n", presence_penalty=1.0), 0.0)
    made.join(joining("b", 1, tokens=(4, 5), first_layer=1, next_worker="", presence_penalty=1.0), 0.0)
    made.arrive([piece("b", (4, 5), number=1)])
    step, _ = made.next_step()
    assert [(each.request_id, each.samples) for each in step.sequences] == [("a", False), ("b", True)]
    assert [start.history for start in step.starts if start.request_id == "b"] == [(4, 5)]


def test_what_comes_early_waits_and_what_comes_late_is_dropped():
    made, pool = scheduler()
    made.arrive([piece("b", (1, 2), number=5)])
    assert made.next_step() is None
    made.join(joining("a", 4, first_layer=1), 0.0)
    assert made.next_step() is None
    made.join(joining("b", 5, first_layer=1), 0.0)
    assert ran(made.next_step()) == [("b", 0, 2)]
    assert made.leave("b")
    made.arrive([piece("b", (3,), 2, number=5, index=1)])
    made.arrive([piece("never", (3,), 2, number=6)])
    made.join(joining("c", 7, first_layer=1), 0.0)
    assert made.next_step() is None and not made._early and made.leave("a") and made.leave("c")
    assert pool.free == BLOCKS


def test_a_request_of_which_a_part_never_arrives_fails():
    made, _ = scheduler()
    for number, name in enumerate("ab"):
        made.join(joining(name, number, first_layer=1), 0.0)
    made.arrive([piece("a", range(4)), piece("b", range(4), number=1), piece("a", (9,), 6)])
    assert ran(made.next_step()) == [("b", 0, 4)]
    assert made.take_faults() == {"a": "tokens 4 to 6 of it did not arrive"}


def test_a_request_without_blocks_fails_alone():
    made, pool = scheduler(max_prompt_tokens=100, blocks=4)
    made.join(joining("a", 0, tokens=range(10)), 0.0)
    made.join(joining("b", 1, tokens=range(10)), 0.0)
    assert ran(made.next_step()) == [("a", 0, 10)]
    assert list(made.take_faults()) == ["b"] and not made.take_faults()
    assert made.leave("b") and made.leave("a") and pool.free == 4


@pytest.mark.parametrize("seed", range(4))
def test_whatever_arrives_runs_once_and_in_order(seed):
    rng, (made, pool) = random.Random(seed), scheduler(blocks=10**4)
    due, done, alive = {}, Counter(), {}
    for number in range(300):
        if rng.random() < 0.3 or not alive:
            name, layer = f"r{number}", rng.choice((0, 1, 2))
            prompt = rng.randint(1, 40)
            made.join(
                joining(name, number, tokens=range(prompt) if not layer else (), first_layer=layer), 0.0
            )
            alive[name], due[name] = (layer, number, prompt), prompt
            if layer:
                cut = rng.randint(0, prompt)
                for first, end in ((0, cut), (cut, prompt)):
                    if end > first:
                        made.arrive([piece(name, range(first, end), first, number, samples=end == prompt)])
        elif rng.random() < 0.1:
            name = rng.choice(sorted(alive))
            assert made.leave(name)
            del alive[name], due[name]
        else:
            name = rng.choice(sorted(alive))
            layer, own, _ = alive[name]
            if done[name] == due[name]:
                token = NextToken(request_id=name, token=1, position=due[name], index=due[name])
                if layer:
                    made.arrive([piece(name, (1,), due[name], own, index=due[name])])
                else:
                    made.next_token(token, 0.0)
                due[name] += 1
        if step := made.next_step():
            assert sum(len(each.tokens) for each in step[0].sequences if each.index == 0) <= 16 + 40
            for name, position, count in ran(step):
                assert position == done[name]
                done[name] += count
    while step := made.next_step():
        for name, position, count in ran(step):
            assert position == done[name]
            done[name] += count
    assert all(done[name] == tokens for name, tokens in due.items()) and not made.take_faults()
    for name in alive:
        made.leave(name)
    assert pool.free == 10**4


def test_layers_with_a_window_give_back_what_steps_have_passed():
    """Whatever the length of a prompt, it holds no more of their blocks than its window and one step."""
    window, running = 6, 16
    pool = WindowedPool(100, (window - 1 + running) // SIZE + 2, SIZE, window, running, reuse=False)
    made = RangeScheduler(running, 8, pool)
    made.join(joining("a", tokens=range(150)), 0.0)
    ended = 0
    while (step := made.next_step()) is not None:
        made.ran(step[1])
        ended += sum(len(each.tokens) for each in step[0].sequences)
    assert ended == 150 and not made.take_faults()
    for position in range(150, 190):
        made.next_token(NextToken(request_id="a", token=1, position=position, index=position - 149), 0.0)
        made.ran(made.next_step()[1])
    assert not made.take_faults() and made.leave("a") and pool.free == 100
