"""The launchers by name. Each module is imported only when its launcher is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cost_model.errors import InputError
from runtime.launcher.base import Launcher

if TYPE_CHECKING:
    from runtime.p2p.membership.membership import Membership

LOCAL, P2P = "local", "p2p"
_CLASSES = {
    LOCAL: ("runtime.launcher.local", "LocalLauncher"),
    "ray": ("runtime.launcher.ray", "RayLauncher"),
    P2P: ("runtime.launcher.p2p", "P2pLauncher"),
}


def make_launcher(
    name: str, membership: Membership | None = None, cuda_devices: int | None = None
) -> Launcher:
    """The launcher of that name.

    Parameters
    ----------
    membership : in the network of nodes; "p2p" needs one, and no other launcher takes one
    cuda_devices : see EngineOptions; for "local" only

    Raises
    ------
    InputError : there is no such launcher (names those that there are), or an option does not fit it
    """
    if name not in _CLASSES:
        raise InputError("--launcher", name, "does not exist", f"choose from: {', '.join(_CLASSES)}")
    if (name == P2P) != (membership is not None):
        raise InputError("--launcher", name, "has other options", "join nodes with --launcher p2p only")
    if cuda_devices is not None and name != LOCAL:
        problem = "is for GPUs of this machine, which --launcher local uses"
        raise InputError("--cuda-devices", str(cuda_devices), problem, "leave it out")
    module, kind = _CLASSES[name]
    given = {"membership": membership, "cuda_devices": cuda_devices}
    options = {key: value for key, value in given.items() if value is not None}
    made: Launcher = getattr(importlib.import_module(module), kind)(**options)
    return made
