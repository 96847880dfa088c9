"""`import hexgen2` is light and typed, and gives the same answers and errors as the command line."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys

import pytest
from commands import hexgen2 as run
from mypy import api as mypy

import hexgen2
import hexgen2.api
import hexgen2.placement

ASKED = {"cluster": "hexgen2-case-study", "model": "llama-2-13b", "workload": "LPLD"}
OPTIONS = [word for name, value in ASKED.items() for word in (f"--{name}", value)]
TIMES = re.compile(r'"seconds": [-+.e0-9]+')


@pytest.fixture(scope="module")
def placement() -> hexgen2.Placement:
    return hexgen2.search(**ASKED)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_loads_nothing_heavy():
    names = python("import sys, hexgen2; print(*sys.modules)").split()
    heavy = {"numpy", "pydantic", "scipy", "ortools", "networkx", "yaml", "rich", "click", "torch"}
    assert not heavy & {name.partition(".")[0] for name in names}


def test_all_names_are_there_and_stay_after_the_packages_of_the_same_name_are_used():
    code = (
        "import hexgen2; assert set(hexgen2.__all__) <= set(dir(hexgen2));"
        "import hexgen2.search.problem, hexgen2.replan.search;"
        "print(all(map(callable, (getattr(hexgen2, n) for n in hexgen2.__all__ if n != '__version__'))));"
        "print(hexgen2.search.__module__, hexgen2.replan.__module__, hexgen2.__version__)"
    )
    assert python(code).split()[:3] == ["True", "hexgen2.api", "hexgen2.api"]
    with pytest.raises(AttributeError, match="no attribute 'serch'"):
        hexgen2.serch  # noqa: B018


def test_imports_for_type_checkers_only_exist():
    """mypy treats a missing module as Any here, so it would not report a wrong name."""
    for module in (hexgen2, hexgen2.api):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                found = importlib.import_module(str(node.module))
                assert all(hasattr(found, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize(
    "module", [hexgen2, hexgen2.api, hexgen2.placement], ids=lambda module: module.__name__
)
def test_examples_of_the_docstrings_run(module):
    found = doctest.testmod(module)
    assert found.attempted > 3 and not found.failed


def test_every_function_documents_its_parameters_and_errors():
    for name in ("search", "replan", "simulate", "compare", "estimate"):
        function = getattr(hexgen2, name)
        text = function.__doc__
        assert all(section in text for section in ("Parameters\n", "Raises\n", "Examples\n")), name
        described = set(re.findall(r"\w+", " ".join(re.findall(r"^    ([\w, ]+) :", text, re.M))))
        described |= set(inspect.signature(hexgen2.search).parameters) if name == "replan" else set()
        assert set(inspect.signature(function).parameters) <= described, name


def test_type_checkers_see_the_types(tmp_path):
    path = tmp_path / "snippet.py"
    path.write_text(
        "import hexgen2\n"
        "p = hexgen2.search(cluster='c', model='m', workload='w', time_limit_s=1.0)\n"
        "reveal_type(p)\n"
        "reveal_type(hexgen2.simulate(p, request_rate=4.0).p99_tpot_ms)\n"
        "reveal_type(hexgen2.load_model('m'))\n"
        "hexgen2.search(cluster='c', model='m', objective='speed')\n"
    )
    out, _, _ = mypy.run([str(path)])  # shares the cache of `make check`
    shown = re.findall(r'Revealed type is "([\w.]+)"', out)
    names = ["hexgen2.placement.Placement", "float", "cost_model.architecture.ModelArchitecture"]
    assert [name.removeprefix("builtins.") for name in shown] == names, out
    assert out.count(f"{path.name}:6: error:") == 1 and "objective" in out, out


def test_names_files_and_objects_give_what_the_command_line_gives(placement, tmp_path):
    printed = run("search", *OPTIONS, "--json")
    assert printed.returncode == 0, printed.stderr
    text = TIMES.sub("", printed.stdout)
    assert TIMES.sub("", placement.to_json()) == text
    workload = hexgen2.Workload.model_validate(json.loads(text.replace("\n  ,", '\n  "x": 0,'))["workload"])
    again = hexgen2.search(
        cluster=hexgen2.load_cluster(ASKED["cluster"]),
        model=hexgen2.load_model(ASKED["model"]),
        workload=workload,
        goal=hexgen2.Goal(),
    )
    assert TIMES.sub("", again.to_json()) == text


def test_a_saved_placement_is_the_same_when_loaded(placement, tmp_path):
    placement.save(tmp_path / "p.json")
    assert hexgen2.load_placement(tmp_path / "p.json") == placement
    shown = run("show", str(tmp_path / "p.json"))
    assert shown.returncode == 0 and placement.replicas[0].id in shown.stdout


def test_a_placement_is_a_graph(placement):
    graph = placement.to_networkx()
    assert set(graph) == {replica.id for replica in placement.replicas}
    flow = sum(figures["flow_req_s"] for _, _, figures in graph.edges(data=True))
    alone = [r for r in placement.replicas if r.role == "colocated"]
    flow += sum(r.utilisation * r.capacity_req_s for r in alone)
    assert flow == pytest.approx(placement.throughput.req_s)


def test_simulating_gives_what_the_command_line_writes(placement, tmp_path, capsys):
    path, out = tmp_path / "p.json", tmp_path / "results.json"
    placement.save(path)
    options = ("--request-rate", "4", "--num-requests", "200", "--seed", "1", "--ttft", "900")
    written = run("simulate", str(path), *options, "-o", str(out), "--json")
    assert written.returncode == 0 and written.stdout == out.read_text()
    for source in (placement, path, str(path)):
        found = hexgen2.simulate(source, request_rate=4.0, num_requests=200, seed=1, ttft_ms=900)
        assert json.dumps(found.to_dict(), indent=1) + "\n" == written.stdout
    assert found.completed == 200 and 0 < found.attainment <= 1
    assert capsys.readouterr() == ("", "")


def test_replanning_gives_what_the_command_line_gives(placement, tmp_path):
    path = tmp_path / "p.json"
    placement.save(path)
    lost = placement.replicas[0].gpus[0]
    printed = run("search", "--from", str(path), "--lost", lost, "--horizon", "60", "--json")
    found = hexgen2.replan(placement, lost=[lost], horizon_s=60)
    assert TIMES.sub("", found.to_json()) == TIMES.sub("", printed.stdout)
    changed = hexgen2.simulate(placement, request_rate=4.0, num_requests=300, replans=[(found, 10.0)])
    assert changed.completed == 300


def test_estimating_and_comparing_give_what_the_command_line_gives():
    asked = ("--gpu", "H100:8", "--model", "llama-2-70b", "--batch", "16", "--isl", "512")
    found = hexgen2.estimate(gpu="H100:8", model="llama-2-70b", batch=16, isl=512)
    assert json.dumps(found.to_dict()) + "\n" == run("estimate", *asked, "--json").stdout
    rows = hexgen2.compare(**ASKED, strategies=["distserve", "vllm"], seconds=2).rows()
    printed = run("compare", *OPTIONS, "--strategies", "distserve,vllm", "--seconds", "2", "--json")
    assert json.dumps(rows, indent=1) + "\n" == printed.stdout
    objects = {"cluster": hexgen2.load_cluster(ASKED["cluster"]), "model": hexgen2.load_model(ASKED["model"])}
    workload = hexgen2.search(**ASKED, time_limit_s=1).workload
    assert (
        hexgen2.compare(**objects, workload=workload, strategies="distserve,vllm", seconds=2).rows() == rows
    )


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"cluster": "hexgen2-seting-1"}, []),
        ({"model": "lama-2-70b"}, []),
        ({"workload": "HPXD"}, []),
        ({"workload": None}, []),
        ({"strategy": "hexgen3"}, ["--strategy", "hexgen3"]),
        ({"isl": -5.0}, ["--isl", "-5"]),
        ({"objective": "goodput"}, ["--objective", "goodput"]),
        (
            {"frontier": 3, "objective": "cost", "request_rate": 1.0},
            ["--frontier", "3", "--objective", "cost", "--request-rate", "1"],
        ),
        ({"certify": True, "strategy": "genetic"}, ["--certify", "--strategy", "genetic"]),
        ({"cluster": "local-cpu", "model": "llama-2-70b"}, []),
    ],
)
def test_errors_are_the_two_exceptions_with_the_line_of_the_command_line(changes, options):
    named = {**ASKED, **{name: value for name, value in changes.items() if name in ASKED}}
    words = [word for name, value in named.items() if value is not None for word in (f"--{name}", value)]
    ended = run("search", *words, *options)
    kind = {2: hexgen2.InputError, 3: hexgen2.InfeasibleError}[ended.returncode]
    with pytest.raises(kind) as refused:
        hexgen2.search(**{**ASKED, **changes})
    assert ended.stderr.splitlines()[-1] == f"hexgen2: {refused.value}"


@pytest.mark.parametrize(
    "changes",
    [
        {"time_limit_s": 0},
        {"time_limit_s": float("nan")},
        {"seed": -1},
        {"objective": "speed"},
        {"request_rate": -1.0},
        {"cost_model": "table2"},
        {"pipeline": "fast"},
        {"links": "none"},
        {"engine": "torch"},
        {"goal": hexgen2.Goal(objective="goodput")},
        {"goal": hexgen2.Goal(request_rate=1.0), "request_rate": 2.0},
    ],
    ids=str,
)
def test_what_the_command_line_refuses_as_it_reads_options_is_an_input_error_here(changes):
    with pytest.raises(hexgen2.InputError):
        hexgen2.search(**{**ASKED, **changes})


def test_what_simulate_and_others_refuse(placement, tmp_path):
    for options in (
        {},
        {"request_rate": 0},
        {"request_rate": 3, "offline": True},
        {"request_rate": 3, "policy": "best"},
        {"request_rate": 3, "failures": [("nobody", 3.0)]},
        {"request_rate": 3, "replans": [(placement, 3.0)]},
        {"request_rate": 3, "requests_out": tmp_path / "no" / "folder.csv"},
    ):
        with pytest.raises(hexgen2.InputError):
            hexgen2.simulate(placement, **options)
    with pytest.raises(hexgen2.InputError, match="nowhere"):
        hexgen2.replan("nowhere.json", lost=["a"])
    with pytest.raises(hexgen2.InputError, match="horizon"):
        hexgen2.replan(placement, lost=["h100-1/0"], horizon_s=0)
    with pytest.raises(hexgen2.InputError, match="share"):
        hexgen2.compare(**ASKED, share=2.0)
    for options in ({"weights": "int3"}, {"isl": 0}, {"interconnect": "rope"}, {"engine": "none"}):
        with pytest.raises(hexgen2.InputError):
            hexgen2.estimate(**{"gpu": "H100:8", "model": "llama-2-70b", "isl": 512, **options})


def test_ctrl_c_returns_the_best_so_far():
    """As on the command line, the search ends and says what interrupted it."""

    def interrupt(_) -> None:
        raise KeyboardInterrupt

    found = hexgen2.search(**ASKED, progress=interrupt)
    assert found.search.cut == "interrupted" and found.throughput.req_s > 0
