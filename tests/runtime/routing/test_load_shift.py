"""Shares move when requests wait and lengths clearly change, return with them or once nobody waits, and stay
where lengths only vary or little is to gain."""

import heapq

import numpy as np
import pytest
from placements import one_of_each_role

from hexgen2.prediction.other_lengths import with_lengths
from runtime.routing import load_shift
from runtime.routing.load_shift import FEWEST, Lengths, LoadShift
from runtime.routing.reflow import Reflow
from runtime.routing.router import routes_of


def serve(shift, prompts, outputs, cached=0.0, lost=(), pace=5.0, pressed=True):
    """Requests arrive, begin and end, an output token for every 1 / `pace` arrivals of others;
    returns what was said of each move."""
    said, running = [], []
    for k, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        shift.arrived(int(prompt))
        if text := shift.move(lost, pressed):
            said.append(text)
        request = object()
        shift.began(request)
        heapq.heappush(running, (k + output / pace, k, request, int(prompt), int(output)))
        while running[0][0] <= k:
            _, _, request, own, tokens = heapq.heappop(running)
            shift.ended(request, tokens, own, int(own * cached))
    return said


def of_classes(seed, count, prompts=1.0, outputs=1.0):
    """Requests with the lengths of the placement's classes, times factors."""
    classes = one_of_each_role().workload.classes
    weights = np.array([c.weight for c in classes])
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(classes), size=count, p=weights / weights.sum())
    # Lengths vary within a class, too.
    spread = rng.exponential(1.0, (2, count))
    isl = np.array([c.isl for c in classes])[chosen] * spread[0] * prompts
    return isl + 1, np.array([c.osl for c in classes])[chosen] * spread[1] * outputs + 1


def share(routes, replica):
    """The share of all prompts that a replica computes."""
    return sum(r.weight for r in routes if r.prefill == replica) / sum(r.weight for r in routes)


@pytest.mark.parametrize("seed", range(6))
def test_lengths_that_vary_about_the_planned_means_move_nothing(seed):
    shift = LoadShift(one_of_each_role())
    assert serve(shift, *of_classes(seed, 6000)) == []
    assert shift.lengths == shift.planned and shift.moves == 0
    assert shift.routes(()) == routes_of(one_of_each_role())


def test_longer_outputs_make_mixed_replicas_prefill_less_until_outputs_are_as_planned_again():
    shift = LoadShift(one_of_each_role())
    serve(shift, *of_classes(1, 1000))
    (first, *_) = serve(shift, *of_classes(4, 3000, outputs=1.7))
    assert "so shares move: " in first and "mixed-0 prefills" in first and "(was" in first
    assert shift.lengths.output == pytest.approx(1.7 * shift.planned.output, rel=0.25)
    assert shift.lengths.prompt == shift.planned.prompt
    assert share(shift.routes(()), "mixed-0") < share(routes_of(one_of_each_role()), "mixed-0") - 0.01
    serve(shift, *of_classes(3, 4000))
    assert shift.lengths == shift.planned
    assert shift.routes(()) == routes_of(one_of_each_role())


def test_nothing_moves_while_nobody_waits():
    shift = LoadShift(one_of_each_role())
    assert serve(shift, *of_classes(4, 3000, outputs=1.7), pressed=False) == []
    assert shift.routes(()) == routes_of(one_of_each_role())
    assert len(serve(shift, *of_classes(5, load_shift.EVERY, outputs=1.7))) == 1


def test_the_planned_shares_return_once_nobody_waits():
    shift = LoadShift(one_of_each_role())
    serve(shift, *of_classes(4, 3000, outputs=1.7))
    (back,) = serve(shift, *of_classes(5, 3000, outputs=1.7), pressed=False)
    assert "hardly wait any more, so shares move: " in back and "mixed-0 prefills" in back
    assert shift.routes(()) == routes_of(one_of_each_role()) and shift.lengths == shift.planned


def test_shares_stay_where_admission_sends_requests_around_what_is_full():
    """With longer prompts, prefill replicas are full, and mixed ones get what these have no room for."""
    shift = LoadShift(one_of_each_role())
    assert serve(shift, *of_classes(2, 3000, prompts=1.5)) == []
    assert shift.lengths.prompt == pytest.approx(1.5 * shift.planned.prompt, rel=0.25)
    assert shift.moves == 0 and shift.routes(()) == routes_of(one_of_each_role())


@pytest.mark.parametrize("lost", [(), ("prefill-1",), ("decode-0",)])
def test_the_gain_of_another_flow_is_none_for_planned_lengths_and_clear_for_longer_outputs(lost):
    plan, asked = Reflow(one_of_each_role()), one_of_each_role().workload
    assert plan.gain(lost, plan) == pytest.approx(0.0, abs=0.02)
    longer = Reflow(with_lengths(one_of_each_role(), asked.isl, 1.7 * asked.osl))
    assert lost or plan.gain(lost, longer) > load_shift.WORTHWHILE
    assert plan.gain(["mixed-0"], longer) == pytest.approx(0.0, abs=0.02)


def test_cached_tokens_are_no_work():
    shift = LoadShift(one_of_each_role())
    # Twice the tokens, half of which are in the cache. Until that is known, prompts seem to be longer.
    serve(shift, *of_classes(5, 4000, prompts=2.0), cached=0.5)
    assert shift.lengths.prompt == pytest.approx(shift.planned.prompt, rel=load_shift.CHANGED)


def test_the_first_outputs_to_end_do_not_count_as_all():
    """Of 4000 requests that begin within a tenth of the time that one takes, the shortest end first."""
    shift = LoadShift(one_of_each_role())
    assert serve(shift, *of_classes(6, 4000), pace=0.05) == []


def test_a_request_that_hardly_ever_ends_does_not_keep_others_from_counting():
    shift = LoadShift(one_of_each_role())
    shift.began("forever")
    for k in range(load_shift.OVERTAKEN + 10):
        shift.began(k)
        shift.ended(k, 200)
    assert shift._outputs.seen == load_shift.OVERTAKEN + 10
    shift.ended("forever", 10**6)
    assert shift._outputs.mean == pytest.approx(200)


def test_without_a_choice_nothing_is_watched():
    placement = one_of_each_role()
    (own,) = [r for r in placement.routes if r.from_ == r.to]
    alone = placement.model_copy(update={"replicas": [placement.replica(own.from_)], "routes": [own]})
    shift = LoadShift(alone)
    assert serve(shift, *of_classes(7, 2 * FEWEST, prompts=3.0)) == []
    assert shift.lengths == Lengths(alone.workload.isl, alone.workload.osl)


def test_moved_flow_is_near_the_largest_and_leads_to_no_new_or_lost_replica():
    plan = Reflow(one_of_each_role())
    shift = LoadShift.of(plan)
    serve(shift, *of_classes(8, 3000, outputs=1.5))
    assert shift.moves
    for lost in ((), ("prefill-1",), ("decode-0",), ("mixed-0",)):
        routes, before = shift.routes(lost), plan.routes(lost)
        assert {(r.prefill, r.decode) for r in routes} <= {(r.prefill, r.decode) for r in before} | {
            ("mixed-0", "mixed-0")
        }
        assert not {name for r in routes for name in (r.prefill, r.decode)} & set(lost)
        assert 0 < sum(r.weight for r in routes) < sum(r.weight for r in before)
