"""Workloads and traces: shipped classes, formats, errors with line numbers."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.errors import InputError
from hexgen2.workload.arrivals import LengthSource, arrivals
from hexgen2.workload.classes import SHIPPED, list_workloads, load_workload, workload_of_trace
from hexgen2.workload.requests import Requests
from hexgen2.workload.traces import read_trace


def test_shipped_classes():
    assert list(SHIPPED) == ["HPLD", "HPHD", "LPHD", "LPLD", "online"]
    assert (load_workload("hpld").isl, load_workload("HPLD").osl) == (1273.9, 80.2)
    for name in list(SHIPPED)[:4]:
        workload = load_workload(name)
        assert (workload.isl > 512) == name.startswith("HP") and (workload.osl > 128) == name.endswith("HD")
    online = load_workload("Online")
    assert len(online.classes) == 4
    assert online.isl == pytest.approx(762.8, abs=0.05) and online.osl == pytest.approx(232.4, abs=0.05)
    assert sum(c.weight for c in online.classes) == 16663
    assert all(source for _, source in list_workloads())


def test_given_lengths():
    fixed = load_workload(isl=1000, osl=20)
    assert (fixed.isl, fixed.osl, len(fixed.classes)) == (1000, 20, 1)
    both = load_workload("online", isl=500, osl=5)
    assert (both.isl, both.osl, len(both.classes)) == (500, 5, 1)
    one = load_workload("online", isl=500)
    assert one.isl == 500 and one.osl == pytest.approx(232.4, abs=0.05) and len(one.classes) == 4
    assert "isl 500" in one.source


def test_mixtures_keep_the_shares_given():
    mixture = load_workload("hpld:3, online")
    assert mixture.name == "HPLD:3,online:1"
    total = sum(c.weight for c in mixture.classes)
    assert [c.name for c in mixture.classes] == ["HPLD", "HPLD", "HPHD", "LPHD", "LPLD"]
    assert mixture.classes[0].weight / total == pytest.approx(3 / 4)
    assert mixture.classes[2].weight / total == pytest.approx(7254 / 16663 / 4)
    assert mixture.isl == pytest.approx((3 * 1273.9 + load_workload("online").isl) / 4)
    assert load_workload("HPLD:7").lengths.isl == 1273.9


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({}, "--workload: is missing"),
        ({"isl": 5}, "--osl"),
        ({"isl": 0, "osl": 5}, "--isl: is 0"),
        ({"isl": 5, "osl": float("nan")}, "--osl: is nan"),
        ({"isl": 5, "osl": 0.5}, "--osl: is 0.5"),
        ({"workload": "HPLDD"}, "did you mean HPLD?"),
        ({"workload": ""}, "shipped:"),
        ({"workload": "none.csv"}, "none.csv: cannot be read"),
        ({"workload": "a\0b"}, "neither"),
        (
            {"workload": "HPLD:2,LPHX:1"},
            "'LPHX' is not a shipped workload; did you mean LPHD",
        ),
        ({"workload": "HPLD:0,LPHD:1"}, "'0' is not a valid share; give a number"),
        ({"workload": "HPLD:nan"}, "'nan' is not a valid share"),
        ({"workload": "HPLD:1e300,LPHD:1"}, "'1e300' is not a valid share"),
        ({"workload": "HPLD:"}, "'' is not a valid share"),
        ({"workload": "HPLD,,LPHD"}, "'' is not a shipped workload; shipped:"),
        ({"workload": "hpld:1,HPLD:2"}, "names HPLD twice"),
    ],
)
def test_wrong_arguments(arguments, fragment):
    with pytest.raises(InputError) as caught:
        load_workload(**arguments)
    assert fragment in str(caught.value) and len(str(caught.value).splitlines()) == 1


AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,2000,44
2023-11-16 18:15:51.2225670,879,200

"""
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1000, "output_length": 500, "hash_ids": [1, 2]}\n'
    '{"timestamp": 1000, "input_length": 10, "output_length": 5}\n'
)
SHAREGPT = json.dumps(
    [
        {
            "id": "a",
            "conversations": [
                {"from": "human", "value": "x" * 400},
                {"from": "gpt", "value": "y" * 80},
                {"from": "human", "value": "z" * 40},
                {"from": "gpt", "value": "w" * 8},
            ],
        },
        {"conversations": [{"from": "gpt", "value": "unasked"}]},
    ]
)


def trace_of(tmp_path, text):
    file = tmp_path / "trace.dat"
    file.write_text(text)
    return read_trace(file)


def test_azure_is_sorted_and_starts_at_zero(tmp_path):
    trace = trace_of(tmp_path, AZURE.replace("\n", "\r\n"))
    assert trace.arrival_s == pytest.approx([0, 4.314579, 4.541977], abs=1e-5)
    assert trace.isl.tolist() == [2000, 396, 879] and trace.osl.tolist() == [44, 109, 200]
    assert len(trace) == 3


def test_mooncake_times_are_milliseconds(tmp_path):
    trace = trace_of(tmp_path, MOONCAKE)
    assert trace.arrival_s.tolist() == [0, 2] and trace.isl.tolist() == [10, 1000]


def test_sharegpt_lengths_are_estimates_and_say_so(tmp_path):
    trace = trace_of(tmp_path, SHAREGPT)
    assert trace.isl.tolist() == [100, 130] and trace.osl.tolist() == [20, 2]
    assert "estimated" in trace.source and trace.arrival_s.tolist() == [0, 0]


def test_a_trace_becomes_up_to_four_classes(tmp_path):
    (tmp_path / "t.csv").write_text(AZURE)
    workload = load_workload(str(tmp_path / "t.csv"))
    assert {c.name: c.weight for c in workload.classes} == {"HPLD": 1, "HPHD": 1, "LPLD": 1}
    assert workload.isl == pytest.approx((396 + 2000 + 879) / 3)
    assert workload.osl == pytest.approx((109 + 44 + 200) / 3)


def test_classes_of_a_trace_keep_most_of_the_spread_of_its_lengths():
    rng = np.random.default_rng(7)
    isl, osl = (rng.lognormal(mean, 0.8, 4000).astype(int) + 1 for mean in (6.5, 5.0))
    workload = workload_of_trace(Requests(np.zeros(4000), isl, osl, "made up"), "made up")
    assert len(workload.classes) == 36
    for lengths, of in ((isl, "isl"), (osl, "osl")):
        means = np.array([getattr(c, of) for c in workload.classes])
        weights = np.array([c.weight for c in workload.classes])
        kept = np.average((means - lengths.mean()) ** 2, weights=weights) / lengths.var()
        assert 0.6 < kept < 1


def test_requests_of_a_trace_that_are_alike_are_one_class():
    alike = workload_of_trace(Requests(np.zeros(50), np.full(50, 700), np.full(50, 20), "made up"), "made up")
    assert [(c.name, c.weight) for c in alike.classes] == [("HPLD", 50)]


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 2000)), min_size=1, max_size=50))
def test_classes_keep_the_means_of_the_trace(lengths):
    isl, osl = (np.array(column) for column in zip(*lengths, strict=True))
    workload = workload_of_trace(Requests(np.zeros(len(isl)), isl, osl, "made up"), "made up")
    assert workload.isl == pytest.approx(isl.mean()) and workload.osl == pytest.approx(osl.mean())
    assert sum(c.weight for c in workload.classes) == len(isl)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "line 1: there is no column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (AZURE.replace("2000", "-5"), "line 3: ContextTokens is -5"),
        (AZURE.replace("44", "0"), "line 3: GeneratedTokens is 0"),
        (AZURE.replace("44", "1.5"), "line 3: GeneratedTokens is 1.5"),
        (AZURE.replace("44", "many"), "line 3: GeneratedTokens 'many' is not a number"),
        (AZURE.replace("44", "nan"), "line 3: GeneratedTokens 'nan'"),
        (AZURE.replace("2000", "1e300"), "line 3: ContextTokens is 1e+300"),
        (AZURE.replace(",44", ""), "line 3: has 2 columns"),
        (AZURE.replace("2023-11-16 18:15:46.6805900", "noon"), "line 3: TIMESTAMP 'noon'"),
        (AZURE.replace("2023-11-16 18:15:46.6805900", "inf"), "line 3: TIMESTAMP 'inf'"),
        ("some words\n", "line 1: there is no column TIMESTAMP"),
        ("x" * 200_000, "line 1"),
        (MOONCAKE.replace('"output_length": 5}', '"output": 5}'), "line 2: there is no output_length"),
        (MOONCAKE.replace("1000,", "NaN,", 1), "line 1"),
        (MOONCAKE.replace('"input_length": 10,', '"input_length": true,'), "line 2: input_length 'True'"),
        (MOONCAKE + "{\n", "line 3: is not JSON"),
        (MOONCAKE + "[1]\n", "line 3: is not a JSON object"),
        ("[]", "has no requests"),
        ("[1]", "[0].conversations"),
        ('[{"conversations": [{"from": "human"}]}]', "[0].conversations[0].value"),
        ("[" * 100_000, "is not a trace"),
        ("[1,\n2", "line 2: is not JSON"),
    ],
)
def test_bad_traces_name_file_and_place(tmp_path, text, fragment):
    with pytest.raises(InputError) as caught:
        trace_of(tmp_path, text)
    message = str(caught.value)
    assert fragment in message and message.startswith(str(tmp_path)) and len(message.splitlines()) == 1


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.floats(0.001, 1, exclude_max=True),
    st.integers(0, 99),
)
def test_lengths_are_drawn_uniformly_from_their_range(isl, osl, share, seed):
    lengths = LengthSource.load(None, isl, osl, share)
    for longest, drawn in zip((isl, osl), lengths.sample(np.random.default_rng(seed), 300), strict=True):
        shortest = max(1, int(longest * share))
        assert drawn.dtype == np.int64 and shortest <= drawn.min() and drawn.max() <= longest
        # The mean of 300 draws is within six standard deviations of the middle of the range.
        width = longest - shortest + 1
        assert abs(drawn.mean() - (shortest + longest) / 2) <= 6 * width / math.sqrt(12 * 300)


def test_a_range_of_lengths_is_named_and_checked(tmp_path):
    lengths = LengthSource.load("online", length_range=0.5)
    assert lengths.source.endswith("lengths from 50 to 100 % of those of the class")
    isl, _ = lengths.sample(np.random.default_rng(0), 4000)
    assert isl.min() >= 114 and isl.max() <= 1273
    for share in (0.0, -1.0, 1.1, math.nan):
        with pytest.raises(InputError, match="--length-range: is"):
            LengthSource.load("HPLD", length_range=share)
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,5,6\n")
    with pytest.raises(InputError, match="--length-range: does not go with a trace"):
        LengthSource.load(str(trace), length_range=0.8)


def test_a_limit_of_requests_in_flight_needs_no_times_of_arrival():
    lengths = LengthSource.load(None, 10, 10)
    closed = arrivals(lengths, None, False, 30, None, 1.0, 0, max_concurrency=4)
    assert not closed.arrival_s.any() and closed.source.endswith("all 30 at once, at most 4 in flight")
    timed = arrivals(lengths, 2.0, False, 30, None, 1.0, 0, max_concurrency=4)
    assert timed.arrival_s[-1] > 1 and timed.source.endswith("seed 0, at most 4 in flight")
