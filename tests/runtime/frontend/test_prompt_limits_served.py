"""Routes for long prompts in the front end: short prompts stay away, unless no other has room."""

from collections import Counter

from scripted import run, sampling, serving, settle, tokens_of

from runtime.routing.router import Route

SHORT, LONG = [5] * 3, [5] * 20
LIMITED = Route("p0", "d0", 1.0, 10)
"""Of these prompts it takes the long ones."""


async def ends_of(coordinator, prompt):
    request = coordinator.submit(prompt, sampling())
    assert len(await tokens_of(request)) == 4
    return request.record.prefill_replica, request.record.decode_replica


def test_long_prompts_make_up_for_the_short_ones_that_a_route_may_not_take():
    async def scenario():
        async with serving([Route("c0", "c0", 3.0), LIMITED]) as (coordinator, _):
            assert {await ends_of(coordinator, SHORT) for _ in range(12)} == {("c0", "c0")}
            taken = Counter([await ends_of(coordinator, LONG) for _ in range(12)])
            assert taken["p0", "d0"] in (5, 6, 7)  # a quarter of all 24
            await settle(coordinator)

    run(scenario)


def test_short_prompts_are_served_by_what_is_left():
    async def scenario():
        async with serving([Route("c0", "c0", 3.0), LIMITED]) as (coordinator, drivers):
            drivers["c0"].link.close()
            while not coordinator.lost:
                await ends_of(coordinator, LONG)
            assert await ends_of(coordinator, SHORT) == ("p0", "d0")
            await settle(coordinator)

    run(scenario)


def test_a_short_prompt_that_only_a_route_for_long_ones_can_hold_goes_there():
    async def scenario():
        async with serving([Route("c0", "c0", 3.0), LIMITED]) as (coordinator, _):
            coordinator.replicas["c0"].kv_budget_tokens = 5
            assert await ends_of(coordinator, SHORT) == ("p0", "d0")
            await settle(coordinator)

    run(scenario)
