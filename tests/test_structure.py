"""Imports go one way, and light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"cost_model", "cluster_specs", "hexgen2", "runtime"}
MAY_IMPORT = {
    "cost_model": set(),
    "cluster_specs": {"cost_model"},
    "hexgen2": {"cost_model", "cluster_specs"},
    "runtime": {"cost_model", "cluster_specs", "hexgen2"},
}
INTO_THE_RUNTIME = ("hexgen2.commands.launch", "hexgen2.commands.node")
FOR_THE_RUNTIME = (
    *("cluster", "devices", "placement", "replica", "region", "schedulers"),
    *("checks", "layer_ranges", "workload", "network", "prediction", "headwise"),
)
EXPORTS_THAT_ARE_STARTED = {
    "runtime.launcher.ray": "hexgen2.export.ray",
    "runtime.vllm.launcher": "hexgen2.export.vllm_command",
    "runtime.vllm.requests": "hexgen2.export.vllm_command",
}
"""Exceptions: a launcher starts the same vLLM commands that an export writes."""
FOR_P2P = ("runtime.p2p", "runtime.frames", "runtime.liveness", "cost_model")


def _modules() -> dict[str, Path]:
    """Every module of the packages, by name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def imported(body: list[ast.stmt] | list[ast.AST]) -> set[str]:
    """The modules of the packages that these statements import."""
    names = set()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & MODULES.keys() or {node.module}
    return names & MODULES.keys()


def at_import(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that run when a module is imported, without functions and imports for type checkers."""
    found = []
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node)
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            found += at_import(inner)
    return found


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
IMPORTS = {name: imported(list(ast.walk(tree))) for name, tree in TREES.items()}
"""Everything that each module imports, inside functions too."""


def is_within(module: str, rooms: Iterable[str]) -> bool:
    """Whether a module is one of these packages or modules, or inside one."""
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_import_downwards(package):
    for module in [name for name in MODULES if is_within(name, [package])]:
        allowed = MAY_IMPORT[package] | {package}
        if module in INTO_THE_RUNTIME:
            allowed = allowed | {"runtime"}
        elif is_within(module, ["hexgen2.simulator"]):
            allowed = allowed | {"runtime.routing"}
        forbidden = {name for name in IMPORTS[module] if not is_within(name, allowed)}
        assert not forbidden, f"{module} imports {forbidden}"


def test_the_runtime_knows_placements_and_not_how_they_are_found():
    allowed = {f"hexgen2.{room}" for room in FOR_THE_RUNTIME}
    for module in [name for name in MODULES if is_within(name, ["runtime"])]:
        used = {name for name in IMPORTS[module] if is_within(name, ["hexgen2"])}
        forbidden = {name for name in used if not is_within(name, allowed)}
        assert forbidden <= {EXPORTS_THAT_ARE_STARTED.get(module)}, f"{module} imports {forbidden}"


def test_the_network_of_peers_knows_nothing_of_what_it_carries():
    for module in [name for name in MODULES if is_within(name, ["runtime.p2p"])]:
        forbidden = {name for name in IMPORTS[module] if not is_within(name, FOR_P2P)}
        assert not forbidden, f"{module} imports {forbidden}"


def test_no_modules_import_each_other():
    """Only imports at import time count; those inside functions do not."""
    graph = networkx.DiGraph(
        (name, other) for name, tree in TREES.items() for other in imported(at_import(tree.body))
    )
    cycles = [sorted(part) for part in networkx.strongly_connected_components(graph) if len(part) > 1]
    assert not cycles


def room_of(module: str) -> str:
    """The folder or file right below a package that a module belongs to."""
    return ".".join(module.split(".")[:2])


def test_no_rooms_import_each_other():
    """A room stands above the rooms that it imports; imports inside functions are not counted."""
    pairs = {
        (room_of(name), room_of(other))
        for name, tree in TREES.items()
        for other in imported(at_import(tree.body))
    }
    graph = networkx.DiGraph(pair for pair in pairs if pair[0] != pair[1])
    cycles = [sorted(part) for part in networkx.strongly_connected_components(graph) if len(part) > 1]
    assert not cycles


PLANNING = (
    "cost_model",
    *(
        f"hexgen2/{room}"
        for room in ("network", "prediction", "search", "strategies", "rent", "replan", "simulator")
    ),
)
MACHINE_DEPENDENT = {
    *(f"math.{name}" for name in ("exp", "expm1", "log", "log2", "log10", "log1p", "pow")),
    *(
        f"np.{name}"
        for name in ("dot", "vdot", "inner", "outer", "matmul", "einsum", "tensordot", "exp", "log")
    ),
}
MAY_DEPEND = {
    "cost_model/portable.py": "asks math.log for its errors only",
    "cost_model/calibration.py": "fits to five digits",
    "hexgen2/search/partition/spectral.py": "reads eigenvectors so that last bits do not matter",
}


@pytest.mark.parametrize("folder", PLANNING)
def test_planning_computes_alike_on_every_machine(folder):
    """Planning uses no BLAS and none of the C library's functions whose last bits differ
    (docs/structure.md)."""
    for path in (ROOT / folder).rglob("*.py"):
        if str(path.relative_to(ROOT)) in MAY_DEPEND:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert not product, f"{path}:{node.lineno} multiplies matrices by BLAS"
            assert called not in MACHINE_DEPENDENT and ".linalg." not in called, (
                f"{path}:{node.lineno} {called}"
            )


def loaded_by(module: str) -> set[str]:
    """The modules in memory after a fresh interpreter imports this one."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_router_and_the_coordinator_need_no_torch():
    for module in ("runtime.routing.router", "runtime.frontend.coordinator", "runtime.kv_cache.layout"):
        assert "torch" not in loaded_by(module)


def test_the_simulator_needs_nothing_that_only_a_launch_needs():
    assert not loaded_by("hexgen2.simulator.run") & {"torch", "msgspec", "fastapi", "transformers", "ortools"}


def test_the_runtime_never_loads_the_search():
    loaded = loaded_by("runtime.serve, hexgen2.checks")
    assert not {name for name in loaded if name.startswith(("hexgen2.search.", "hexgen2.strategies"))}


def test_the_command_line_starts_light():
    loaded = loaded_by("hexgen2.cli")
    assert not loaded & {"torch", "transformers", "scipy", "ortools", "fastapi"}
