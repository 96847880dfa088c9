"""No name, path or argument can put control characters on the terminal, and JSON output is unaltered."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
import yaml
from commands import hexgen2
from rich.table import Table

from cost_model.errors import InputError
from cost_model.printable import one_line, printable, printable_json
from hexgen2.report.placement import PlainConsole

ROOT = Path(__file__).resolve().parents[3]
CONTROL = ["\x00", "\x07", "\x1b", "\x7f", "\x85", "\x9b", "\u061c", "\u200e", "\u2028", "\u202e", "\u2069"]
HOSTILE = "x\x1b[2Jy\x9bz\x7f\u202ew"
SHOWN = r"x\x1b[2Jy\x9bz\x7f\u202ew"
NODES = [{"name": "a", "accelerators": "L4:2"}, {"name": "b", "accelerators": "L4:2"}]
SPEC = {
    "name": "t",
    "nodes": NODES,
    "network": {"uplinks": [{"name": "rack", "nodes": ["a"], "bandwidth_gbit_s": 1}]},
    "accelerators": {"Mine": {"memory_gib": 9, "bf16_dense_tflops": 9, "memory_bandwidth_gbyte_s": 9}},
}
ASKED = ("--model", "llama-2-7b", "--workload", "LPLD", "--time-limit", "1")


def refused(*arguments: str) -> str:
    """The one line of a refusal, which contains no control character."""
    ended = hexgen2(*arguments)
    assert ended.returncode == 2 and not ended.stdout, ended
    (line,) = ended.stderr.removesuffix("\n").split("\n")
    assert line.isprintable() and line.startswith("hexgen2: ")
    return line


@pytest.fixture(scope="module")
def placement(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    cluster, path = folder / "c.yaml", folder / "p.json"
    cluster.write_text(json.dumps(SPEC))
    options = (*ASKED, "--phases", "disaggregated", "-o", str(path))
    made = hexgen2("search", "--cluster", str(cluster), *options)
    assert made.returncode == 0, made.stderr
    return path


@pytest.mark.parametrize("character", CONTROL)
def test_control_characters_are_shown_as_escapes(character):
    for shown in (
        printable(f"a{character}b"),
        one_line(f"a{character}b"),
        str(InputError("file", character, "is wrong", "correct it")),
    ):
        assert shown.isprintable() and f"{ord(character):02x}" in shown
    text = json.dumps({"a": f"a{character}b\n"}, ensure_ascii=False, indent=1)
    assert json.loads(printable_json(text)) == json.loads(text)
    assert printable_json(text).replace("\n", "").isprintable()


def test_other_text_stays_as_it_is():
    text = "naïve 你好 שלום 🙂 \\x1b\n\tnext"
    assert printable(text) == text and printable_json(text) == text
    assert one_line(text) == "naïve 你好 שלום 🙂 \\x1b next"


def put(tree, path, value):
    *parents, last = path
    for step in parents:
        tree = tree[step]
    if last == "key":
        tree[value] = tree.pop("Mine")
    else:
        tree[last] = value


@pytest.mark.parametrize(
    "path",
    [
        *(
            ("name",),
            ("description",),
            ("nodes", 0, "name"),
            ("nodes", 0, "accelerators"),
            ("nodes", 0, "region"),
        ),
        *(("network", "uplinks", 0, "name"), ("network", "uplinks", 0, "nodes", 0), ("accelerators", "key")),
        *(("nodes", 0, "interconnect"), ("network", "measured")),
    ],
    ids=lambda path: ".".join(map(str, path)),
)
def test_a_cluster_s_names(tmp_path, path):
    spec = json.loads(json.dumps(SPEC))
    put(spec, path, HOSTILE)
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(spec))
    assert r"\x1b" in refused("search", "--cluster", str(file), *ASKED)


PLACED = [
    *(("strategy",), ("cluster", "name"), ("model", "name"), ("workload", "name"), ("workload", "source")),
    *(("cost_model", "name"), ("cost_model", "calibration"), ("replicas", 0, "id"), ("bottlenecks", 0)),
    *(("replicas", 0, "stages", 0, "gpus", 0), ("routes", 0, "from"), ("bound", "assumptions", 0)),
    *(("search", "cut"), ("replicas", 0, "role"), ("unknown",)),
]


@pytest.mark.parametrize("path", PLACED, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize(
    "command", [("show",), ("simulate", "--request-rate", "1"), ("launch",)], ids=lambda c: c[0]
)
def test_a_placement_s_names(placement, tmp_path, path, command):
    tree = json.loads(placement.read_text())
    put(tree, path, HOSTILE)
    file = tmp_path / "p.json"
    file.write_text(json.dumps(tree))
    assert refused(*command, str(file))


@pytest.mark.parametrize(
    "arguments",
    [
        (HOSTILE,),
        ("show", HOSTILE),
        ("show", f"--{HOSTILE}"),
        ("list", HOSTILE),
        ("search", "--seed", HOSTILE),
        ("search", "--cluster", HOSTILE, *ASKED),
        ("search", "--cluster", "hetis-12", "--model", HOSTILE, "--workload", "LPLD"),
        ("search", "--cluster", "hetis-12", "--model", "llama-2-7b", "--workload", HOSTILE),
        ("search", "--strategy", HOSTILE),
        ("estimate", "--gpu", HOSTILE, "--model", "llama-2-7b", "--isl", "1"),
        ("estimate", "--gpu", "L4", "--model", "llama-2-7b", "--isl", "1", "--engine", HOSTILE),
        ("compare", "--cluster", "hetis-12", "--strategies", HOSTILE, "--model", "m", "--workload", "w"),
    ],
    ids=lambda arguments: printable(" ".join(arguments)),
)
def test_arguments(arguments):
    assert SHOWN.split("[")[0] in refused(*arguments)


def test_names_of_files_that_become_names(placement, tmp_path):
    trace = tmp_path / f"{HOSTILE}.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,10,10\n")
    for command in (
        ("simulate", str(placement)),
        ("search", "--cluster", "hetis-12", "--model", "llama-2-7b"),
    ):
        assert "has control characters" in refused(*command, "--workload", str(trace))
    model = tmp_path / f"m{HOSTILE}"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    assert "config.json" in refused("estimate", "--gpu", "L4", "--isl", "9", "--model", str(model))
    steps = tmp_path / "steps.csv"
    head = "gpu,model,tp,phase,batch,input_len_or_context,measured_ms"
    steps.write_text(f"{head}\n" + "L4,llama-2-7b,1,prefill,1,512,120\n" * 2)
    assert "give another --name" in refused("calibrate", str(steps), "--name", HOSTILE)
    steps.write_text(f"{head},mine\nL4,llama-2-7b,1,prefill,1,512,120,{HOSTILE}\n")
    assert "line 2: has control characters" in refused("estimate", "--csv", str(steps))


def test_paths_that_are_written_are_shown_as_escapes(placement, tmp_path):
    ended = hexgen2("export", str(placement), "--format", "ray", "-o", str(tmp_path / HOSTILE))
    assert ended.returncode == 0 and SHOWN in ended.stdout
    assert printable(ended.stdout) == ended.stdout and (tmp_path / HOSTILE).is_dir()


def test_tables_show_text_as_it_is():
    """Markup, emoji codes and control characters in names have no effect, on a terminal either."""
    out = io.StringIO()
    console = PlainConsole(file=out, width=200, force_terminal=True, color_system=None, highlight=False)
    names = [HOSTILE, "[/bold]", "[link=file:///etc]x[/link]", "a:100:b"]
    table = Table("name", HOSTILE, box=None)
    for name in names:
        console.print(f"name {name}")
        table.add_row(name, name)
    console.print(table)
    lines = out.getvalue().split("\n")
    assert all(SHOWN in lines[number] for number in (0, 4, 5))
    assert all(name in lines[number] for number, name in enumerate(names) if name != HOSTILE)
    rows = out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")  # the table's header is bold
    assert printable(rows) == rows


@pytest.mark.parametrize("name", ["naïve 🙂", "[/bold]", "a:100:b", "שלום"])
def test_names_that_are_only_unusual_are_printed_and_written(placement, tmp_path, name):
    tree = json.loads(placement.read_text())
    tree["cluster"]["name"] = tree["model"]["name"] = tree["strategy"] = name
    file, results = tmp_path / "p.json", tmp_path / "r.json"
    file.write_text(json.dumps(tree))
    shown = hexgen2("show", str(file))
    assert shown.returncode == 0 and shown.stdout.count(name) == 3
    ended = hexgen2(
        "simulate", str(file), "--request-rate", "1", "--num-requests", "3", "--json", "-o", str(results)
    )
    assert ended.returncode == 0 and ended.stdout == results.read_text()
    assert json.loads(ended.stdout)["cluster"] == name


HOMES = {"hexgen2/terminal.py", "hexgen2/report/placement.py", "runtime/operator.py"}


@pytest.mark.parametrize("package", ["cost_model", "cluster_specs", "hexgen2", "runtime"])
def test_nothing_else_prints(package):
    printers = {"print", "click.echo", "click.secho", "Console", "sys.stdout.write", "sys.stderr.write"}
    for path in (ROOT / package).rglob("*.py"):
        if str(path.relative_to(ROOT)) in HOMES:
            continue
        called = [
            ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)
        ]
        assert not printers & set(called), f"{path} prints past hexgen2/terminal.py"
