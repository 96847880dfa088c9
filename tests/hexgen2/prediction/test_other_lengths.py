"""A placement under requests of other lengths: prompts cost prefill, outputs cost decode, and no more."""

import pytest
from placements import one_of_each_role

import hexgen2
from hexgen2.prediction.other_lengths import with_lengths
from hexgen2.region import Region


def placed():
    found = one_of_each_role()
    assert {replica.role for replica in found.replicas} == {"prefill", "decode", "mixed"}
    return found


def other(prompts, outputs, placement=None):
    placement = placement or placed()
    return with_lengths(placement, placement.workload.isl * prompts, placement.workload.osl * outputs)


def ratios(changed, role):
    pairs = zip(placed().replicas, changed.replicas, strict=True)
    return [b.capacity_req_s / a.capacity_req_s for a, b in pairs if a.role == role]


def test_the_planned_lengths_change_nothing():
    same = other(1.0, 1.0)
    for before, after in zip(placed().replicas, same.replicas, strict=True):
        assert after.capacity_req_s == pytest.approx(before.capacity_req_s)
    assert [r.capacity_req_s for r in same.routes if r.from_ != r.to] == [
        r.capacity_req_s for r in placed().routes if r.from_ != r.to
    ]


def test_longer_prompts_take_prefill_replicas_and_links_about_as_much_longer():
    longer = other(1.5, 1.0)
    assert all(ratio == pytest.approx(1 / 1.5, rel=0.03) for ratio in ratios(longer, "prefill"))
    assert all(
        1 / 1.5 < ratio < 1 for ratio in ratios(longer, "decode")
    )  # they hold and read longer contexts
    assert all(1 / 1.5 < ratio < 1 for ratio in ratios(longer, "mixed"))
    for before, after in zip(placed().routes, longer.routes, strict=True):
        assert after.kv_bytes_per_req == pytest.approx(1.5 * before.kv_bytes_per_req)
        assert sum(link.bytes_per_req for link in after.links) == pytest.approx(after.kv_bytes_per_req)


def test_longer_outputs_take_decode_replicas_longer_and_prefill_replicas_not():
    longer = other(1.0, 1.5)
    assert all(ratio == pytest.approx(1.0) for ratio in ratios(longer, "prefill"))
    assert all(ratio < 1 / 1.45 for ratio in ratios(longer, "decode"))


@pytest.mark.parametrize("factors", [(3.0, 1.0), (0.2, 1.0), (1.0, 4.0), (1.0, 0.1)])
def test_regions_stay_sound_and_a_replica_alone_does_what_its_region_allows(factors):
    for replica in other(*factors).replicas:
        if replica.region is not None:
            region = Region(tuple(replica.region))
            assert region.sound and region.balanced == pytest.approx(replica.capacity_req_s)


def test_colocated_replicas_share_their_time_between_both_phases():
    placement = hexgen2.search(
        cluster="hexgen2-case-study", model="llama-2-13b", workload="online", phases="colocated"
    )
    for factors in ((1.5, 1.0), (1.0, 1.5), (1.5, 1.5)):
        for before, after in zip(placement.replicas, other(*factors, placement).replicas, strict=True):
            assert 0.4 < after.capacity_req_s / before.capacity_req_s < 1
