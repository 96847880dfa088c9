"""The launchers by name. Each module is imported only when its launcher is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cost_model.errors import InputError
from runtime.launcher.base import Launcher

if TYPE_CHECKING:
    from runtime.p2p.membership.membership import Membership

P2P = "p2p"
_CLASSES = {
    "local": ("runtime.launcher.local", "LocalLauncher"),
    "ray": ("runtime.launcher.ray", "RayLauncher"),
    P2P: ("runtime.launcher.p2p", "P2pLauncher"),
}


def make_launcher(name: str, membership: Membership | None = None) -> Launcher:
    """The launcher of that name.

    Parameters
    ----------
    membership : in the network of nodes; "p2p" needs one, and no other launcher takes one

    Raises
    ------
    InputError : there is no such launcher (names those that there are), or the membership does not fit it
    """
    if name not in _CLASSES:
        raise InputError("--launcher", name, "does not exist", f"choose from: {', '.join(_CLASSES)}")
    if (name == P2P) != (membership is not None):
        raise InputError("--launcher", name, "has other options", "join nodes with --launcher p2p only")
    module, kind = _CLASSES[name]
    made: Launcher = getattr(importlib.import_module(module), kind)(*filter(None, [membership]))
    return made
