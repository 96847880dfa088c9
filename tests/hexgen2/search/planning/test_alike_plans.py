"""What is remembered of a plan for all that are alike is what each of them would be found to do by itself."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from problems import problems

from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import counts_of


@settings(max_examples=25, deadline=None)
@given(problems(max_gpus=8))
def test_alike_replicas_can_do_what_each_can(problem):
    planner, sizes = Planner(problem), [len(gpus) for gpus in problem.node_gpus]
    nodes = range(len(sizes))
    groups = [counts_of({node: count}) for node in nodes for count in {1, sizes[node]} if sizes[node]]
    groups += [
        counts_of({a: sizes[a], b: sizes[b]})
        for a, b in itertools.combinations(nodes, 2)
        if sizes[a] and sizes[b]
    ]
    for counts in groups:
        plan = planner.plan("colocated", counts)
        for waits_s in (None, 0.5, 5.0) if plan else ():
            alone = Planner(problem)
            assert planner.region(plan, waits_s) == alone.region(alone.plan("colocated", counts), waits_s)
        decode = planner.plan("decode", counts)
        if decode:
            alone = Planner(problem)
            own = alone.decodes_beside(alone.plan("decode", counts), 0.5)
            assert planner.decodes_beside(decode, 0.5) == own
