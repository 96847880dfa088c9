"""Imports go one way, and light things stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"cost_model", "cluster_specs", "hexgen2", "runtime"}
MAY_IMPORT = {
    "cost_model": set(),
    "cluster_specs": {"cost_model"},
    "hexgen2": {"cost_model", "cluster_specs"},
    "runtime": {"cost_model", "cluster_specs", "hexgen2"},
}

SHARED_WITH_THE_SIMULATOR = ("runtime.routing.", "runtime.options")


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_import_downwards(package):
    for path in (ROOT / package).rglob("*.py"):
        allowed = MAY_IMPORT[package] | {package}
        if path.parent == ROOT / "hexgen2" / "commands" and path.name in ("launch.py", "node.py"):
            allowed = allowed | {"runtime"}  # the only ways from above into the runtime
        modules = imported(path)
        if path.parent == ROOT / "hexgen2" / "simulator":
            modules = {name for name in modules if not name.startswith(SHARED_WITH_THE_SIMULATOR)}
        others = {name.split(".")[0] for name in modules} & PACKAGES
        assert others <= allowed, f"{path} imports {others - allowed}"


PLANNING = (
    "cost_model",
    *(f"hexgen2/{room}" for room in ("network", "search", "strategies", "rent", "replan", "simulator")),
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
    """No BLAS and none of the C library's functions whose last bits differ (docs/structure.md)."""
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
    """Modules in memory after importing one in a fresh interpreter."""
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
