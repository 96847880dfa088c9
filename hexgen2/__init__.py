"""HexGen-2: place and serve large language models on mixed GPUs, with disaggregated prefill and decode.

>>> import hexgen2
>>> p = hexgen2.search(cluster="hexgen2-case-study", model="llama-2-13b", workload="LPLD")
>>> r = hexgen2.simulate(p, request_rate=4.0, num_requests=200)
>>> r.completed
200
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cost_model.errors import InfeasibleError, InputError

# `hexgen2.search` and `hexgen2.replan` are functions here and packages on disk. Python binds a package to its
# parent once, when it is first imported: that is now, before the functions take the names.
for _package in ("replan", "search"):
    import_module(f"{__name__}.{_package}")

from hexgen2.api import compare, estimate, load_placement, replan, search, simulate  # noqa: E402

if TYPE_CHECKING:
    from cluster_specs.loader import load_cluster
    from cost_model.models import find_model as load_model
    from hexgen2.goal import Goal
    from hexgen2.placement import Placement
    from hexgen2.workload.lengths import Workload

    __version__: str

_ON_FIRST_USE = {
    "Goal": "hexgen2.goal:Goal",
    "Placement": "hexgen2.placement:Placement",
    "Workload": "hexgen2.workload.lengths:Workload",
    "load_cluster": "cluster_specs.loader:load_cluster",
    "load_model": "cost_model.models:find_model",
}

__all__ = [
    "Goal",
    "InfeasibleError",
    "InputError",
    "Placement",
    "Workload",
    "__version__",
    "compare",
    "estimate",
    "load_cluster",
    "load_model",
    "load_placement",
    "replan",
    "search",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import what is heavy when it is first asked for."""
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("hexgen2")
    elif name in _ON_FIRST_USE:
        module, _, attribute = _ON_FIRST_USE[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
