"""Cost models by name or file: what a file is, which of its engines counts, and what is wrong with it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated, mutated_bytes

from cost_model.base import TensorGroup
from cost_model.coefficients import CoefficientSet, fitted
from cost_model.engines.model import VllmSteps
from cost_model.engines.numbers import EngineFits, EngineNumbers, FittedEngine, HostNumbers, shipped
from cost_model.errors import InputError
from cost_model.hardware import CATALOGUE, NO_LINK
from cost_model.lengths import RequestLengths
from cost_model.models import find_model
from cost_model.operators import Operators
from cost_model.operators.numbers import Fitted, GemmNumbers, OperatorFits, merged
from cost_model.operators.numbers import shipped as shipped_operators
from cost_model.printable import printable
from cost_model.registry import (
    COST_MODELS,
    CostSource,
    cost_models_of_runs,
    find_cost_model,
    load_calibration,
    make_cost_model,
)

MODEL, LENGTHS = find_model("llama-3-8b"), RequestLengths.fixed(1000, 100)
SLOW = Fitted[GemmNumbers](numbers=GemmNumbers(compute=0.1, memory=0.1, launch_us=20.0), rows=10, error=0.03)
OWN = OperatorFits(source="mine", gemm={"H100": {"bf16": SLOW}})
ENGINE = FittedEngine(versions="1.2", numbers=EngineNumbers(step_us=9000.0), hosts={"H100": HostNumbers()})
MINE = EngineFits(name="mine", source="our runs", engines={"sglang": ENGINE, "vllm": ENGINE}, operators=OWN)
SET = fitted().model_copy(update={"name": "ours"})


def write(folder: Path, text: str | bytes, name: str = "mine.json") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def decode_s(source: CostSource, gpu: str = "H100") -> float:
    """Seconds of a decode step of 8 requests on one GPU."""
    costs, group = source.costs(MODEL, LENGTHS), TensorGroup(CATALOGUE[gpu], 1, NO_LINK)
    return 32 * costs.layer_s("decode", group, 8) + costs.edge_s("decode", group, 8, True)


def test_hosts_of_gpus_that_were_not_measured_are_those_of_their_generation():
    hosts = {"H200": HostNumbers(steps=2.0), "B200": HostNumbers(steps=3.0)}
    engine = ENGINE.model_copy(update={"hosts": hosts})
    costs = VllmSteps(MODEL, LENGTHS, fitted=engine)
    steps = {gpu: costs.host(CATALOGUE[gpu]).steps for gpu in ("H200", "H100", "B300", "A40")}
    assert steps == {"H200": 2.0, "H100": 2.0, "B300": 3.0, "A40": 1.0}


@pytest.mark.parametrize("name", COST_MODELS)
def test_names_are_the_models_that_ship(name):
    assert decode_s(find_cost_model(name)) == decode_s(CostSource(name))
    assert make_cost_model(name, MODEL, LENGTHS).source.name == name


def test_a_file_of_coefficients_is_the_general_model_with_them(tmp_path):
    slow = SET.model_copy(update={"base": SET.base.model_copy(update={"memory_efficiency": 0.1})})
    found = find_cost_model(write(tmp_path, slow.to_json()))
    assert (found.name, found.coefficients) == ("calibrated", slow)
    assert decode_s(found) > 2 * decode_s(CostSource("calibrated"))
    named = find_cost_model(f"{tmp_path}/mine.json:splitwise")
    assert named.costs(MODEL, LENGTHS).calibration == "ours for splitwise"
    least = write(tmp_path, '{"name": "bare", "source": "none"}', "bare.json")
    assert find_cost_model(least).coefficients == CoefficientSet(name="bare", source="none")


def test_a_file_of_engines_is_one_engine(tmp_path):
    path = write(tmp_path, MINE.to_json())
    assert load_calibration(path) == MINE
    assert find_cost_model(path).name == "vllm", "of several, vllm"
    for found in (find_cost_model(f"{path}:sglang"), find_cost_model(path, engine="sglang")):
        assert found.name == "sglang" and list(found.engines.engines) == ["sglang"]
    only = MINE.model_copy(update={"engines": {"trtllm": ENGINE}})
    found = find_cost_model(write(tmp_path, only.to_json(), "only.json"))
    costs = found.costs(MODEL, LENGTHS)
    assert (found.name, costs.calibration) == ("trtllm", "mine: trtllm 1.2")
    assert tuple(costs.origin) == ("mine: trtllm 1.2", "trtllm", "our runs")
    assert costs.measured(CATALOGUE["H100"]) and not costs.measured(CATALOGUE["L40S"])


def test_a_colon_in_a_file_name_is_no_engine(tmp_path):
    path = write(tmp_path, MINE.to_json(), "mine:sglang")
    assert find_cost_model(path).name == "vllm"


def test_a_file_replaces_only_the_operators_that_it_has(tmp_path):
    """Of the card and format in the file; other cards, formats and operators keep the numbers that ship."""
    plain = shipped_operators()
    both = merged(plain, OWN)
    assert both.gemm["H100"]["bf16"] == SLOW
    assert both.gemm["H100"]["fp8"] == plain.gemm["H100"]["fp8"]
    assert both.gemm["B200"] == plain.gemm["B200"] and both.experts == plain.experts
    assert both.elsewhere == plain.elsewhere and plain.gemm["H100"]["bf16"] != SLOW
    assert merged(plain, OperatorFits(source="none")).model_dump(exclude={"source"}) == plain.model_dump(
        exclude={"source"}
    )
    found = find_cost_model(write(tmp_path, MINE.model_copy(update={"engines": {}}).to_json()))
    assert found.name == "vllm" and found.engines.engines == {"vllm": shipped().engines["vllm"]}
    assert decode_s(found) > 2 * decode_s(CostSource("vllm"))
    assert decode_s(found, "B200") == decode_s(CostSource("vllm"), "B200")


def test_operators_are_made_once_for_a_card(monkeypatch):
    made = []
    start = Operators.__init__

    def counted(self, accelerator, fits):
        made.append((accelerator.name, fits))
        start(self, accelerator, fits)

    monkeypatch.setattr(Operators, "__init__", counted)
    costs = CostSource("vllm", engines=MINE).costs(MODEL, LENGTHS)
    for degree in (1, 2, 4, 1):
        costs.layer_s("decode", TensorGroup(CATALOGUE["H100"], degree, NO_LINK), 8)
    assert [name for name, _ in made] == ["H100"]
    again = CostSource("vllm", engines=MINE).costs(MODEL, LENGTHS)
    again.layer_s("decode", TensorGroup(CATALOGUE["L40S"], 1, NO_LINK), 8)
    assert made[1][1] is made[0][1], "a calibration is merged with the numbers that ship once"


def test_a_cost_model_goes_to_other_processes(tmp_path):
    source = find_cost_model(write(tmp_path, MINE.to_json()))
    assert decode_s(pickle.loads(pickle.dumps(source))) == decode_s(source)


def test_runs_have_their_own_engine_or_what_is_asked_for(tmp_path):
    engines = ("vllm", "sglang", "trtllm")
    assert {name: s.name for name, s in cost_models_of_runs(None).items()} == dict(
        zip(engines, engines, strict=True)
    )
    assert {s.name for s in cost_models_of_runs("calibrated").values()} == {"calibrated"}
    path = write(tmp_path, MINE.to_json())
    assert {name: s.name for name, s in cost_models_of_runs(path).items()} == {
        "sglang": "sglang",
        "vllm": "vllm",
    }
    assert {s.name for s in cost_models_of_runs(f"{path}:sglang").values()} == {"sglang"}
    ours = cost_models_of_runs(write(tmp_path, SET.to_json(), "set.json"))
    assert all(ours[name].coefficients == SET and ours[name].engine is None for name in engines)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is no calibration: neither coefficients (with name"),
        ('{"gemm": {}}', "is no calibration"),
        ('{"name": "x"}', "is no calibration"),
        ('{"source": "s", "engines": {"orca": {}}}', "engines.orca: is not known; use vllm"),
        (
            '{"source": "s", "engines": {"vllm": {"numbers": {"step_us": -1}}}}',
            "engines.vllm.numbers.step_us",
        ),
        (
            '{"source": "s", "engines": {"sglang": {}, "trtllm": {}}}',
            "engines: has sglang and trtllm; name one",
        ),
        ('{"name": "x", "source": "s", "base": {"overlap": 0.5}}', "base.overlap"),
        ('{"name": "x", "base": {}}', "source: Field required"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (" " * (1 << 20) + "{}", "is larger than"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, text, complaint):
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        find_cost_model(path)
    line = str(caught.value)
    assert complaint in line and line.startswith(str(path)) and "\n" not in line and ";" in line


@pytest.mark.parametrize(
    ("asked", "engine", "complaint"),
    [
        ("oracle", None, "there is no 'oracle'; use vllm, sglang"),
        ("oracle:vllm", None, "there is no 'oracle'"),
        ("./missing.json", None, "cannot be read"),
        (".", None, "is a directory"),
        ("vllm", "sglang", "--engine: does not go with the cost model vllm"),
        ("zero-fit", "splitwise", "--engine: 'splitwise' is not in the cost model zero-fit; known: none"),
        ("calibrated", "orca", "--engine: 'orca' is not in the cost model calibrated; known: "),
        ("x.json:vllm", "vllm", "--engine: does not go with x.json:vllm"),
        ("\x00", None, "there is no"),
    ],
)
def test_wrong_names_are_one_line(asked, engine, complaint):
    with pytest.raises(InputError, match=None) as caught:
        find_cost_model(asked, engine)
    assert complaint in str(caught.value)


def test_an_engine_that_a_file_lacks_is_refused(tmp_path):
    for text, known in ((MINE.to_json(), "sglang, vllm"), (SET.to_json(), "splitwise")):
        with pytest.raises(InputError, match="'trtllm' is not in") as caught:
            find_cost_model(f"{write(tmp_path, text)}:trtllm")
        assert known in str(caught.value)


def usable(path: Path) -> None:
    """Such a file either makes a cost model with finite times, or is refused in one line."""
    try:
        found = find_cost_model(path)
    except InputError as error:
        line = str(error)
        assert line.startswith(str(path)) and printable(line) == line and "\n" not in line
        return
    assert 0 < decode_s(found) < 1e9
    assert printable(found.costs(MODEL, LENGTHS).calibration)


FUZZED = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
SMALL = json.loads(MINE.to_json())


@FUZZED
@given(content=mutated_bytes(MINE.to_json().encode()) | st.binary(max_size=200))
def test_garbage_makes_no_traceback(tmp_path, content):
    usable(write(tmp_path, content))


@FUZZED
@given(tree=mutated(SMALL) | mutated(json.loads(SET.to_json())))
def test_mutated_files_make_no_traceback(tmp_path, tree):
    usable(write(tmp_path, json.dumps(tree)))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@FUZZED
@given(
    tree=JSON
    | st.dictionaries(st.sampled_from(["name", "source", "base", "gpus", "engines", "operators"]), JSON)
)
def test_other_json_makes_no_traceback(tmp_path, tree):
    usable(write(tmp_path, json.dumps(tree)))
