"""A side of engine_speed.py: workers as `hexgen2 launch` starts them, behind the coordinator, without HTTP.

PYTHONPATH=. python benchmarks/engine/sides/our_engine.py CHECKPOINT DTYPE PLACEMENT
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from benchmarks.engine.sides.protocol import Channel
from hexgen2.placement import Placement
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replica import make_replicas
from runtime.frontend.request import Request
from runtime.launcher.configure import configurations
from runtime.launcher.local import LocalLauncher
from runtime.options import EngineOptions
from runtime.protocol.message import Sampling
from runtime.routing.router import Router, routes_of


async def main(checkpoint: str, dtype: str, path: str) -> None:
    """Answer cases with the placement's replicas."""
    channel, placement, launcher = Channel(), Placement.load(Path(path)), LocalLauncher()
    told = configurations(placement, Path(checkpoint), dtype, EngineOptions(dtype=dtype))
    try:
        links = await launcher.start(told, lambda line: print(line, file=sys.stderr))
        replicas = make_replicas(placement, told, links)
        coordinator = Coordinator(Router(routes_of(placement)), replicas)
        coordinator.start()
        channel.ready()
        while (case := await asyncio.to_thread(channel.receive)) is not None:
            sampling = Sampling(max_tokens=case["new_tokens"], ignore_eos=True)
            begun = time.perf_counter()
            requests = [coordinator.submit(prompt, sampling) for prompt in case["prompts"]]
            times_s = await asyncio.gather(*(watch(request, begun) for request in requests))
            channel.send({"times_s": times_s})
        await coordinator.stop()
    finally:
        await launcher.stop()


async def watch(request: Request, begun: float) -> list[float]:
    """When each token arrived, in seconds since `begun`."""
    return [time.perf_counter() - begun async for _ in request]


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
