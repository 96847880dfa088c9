"""Linear models of decode attention, fitted to every other run on this processor and on an attention worker
in another process, against the runs in between (Hetis, SC 2025, section 7.4: at most 6.2 % off)."""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time

import torch

from hexgen2.headwise.profile import AttentionRun, DeviceProfile, fit
from runtime.engine.torch.headwise.heads import Heads
from runtime.engine.torch.headwise.profiling import attention_runs
from runtime.engine.torch.headwise.remote import RemoteHeads
from runtime.engine.torch.headwise.server import AttentionServer
from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import CacheShape
from runtime.protocol.framing import Connection, listen
from runtime.protocol.to_workers import HeadDevice, HeadLane

OWN, WORKER = "own", "attention worker"
BLOCKS, BLOCK_TOKENS, LAYERS = 512, 16, 2
NOTHING_KNOWN = (0.0, 0.0, 0.0, 0.0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--query-heads", type=int, default=8, help="for each KV head")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    heads = lane(asked.head_dim, asked.query_heads)
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        worker = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
        worker.start()
        connection = Connection(listener.accept()[0])
    remote = RemoteHeads(connection, heads.one_head, asked.query_heads)
    print("| device | runs | off by, mean | off by, 95th percentile | seconds of the profiler |")
    print("| --- | --- | --- | --- | --- |")
    with torch.inference_mode():
        for name, holder in ((OWN, heads.own), (WORKER, remote)):
            began_s = time.perf_counter()
            rounds = [list(attention_runs(holder, heads, BLOCKS * BLOCK_TOKENS)) for _ in range(asked.rounds)]
            taken_s = (time.perf_counter() - began_s) / len(rounds)
            runs = [min(same, key=lambda run: run.seconds) for same in zip(*rounds, strict=True)]
            fitted = fit(runs[::2])
            errors = sorted(off(fitted, run) for run in runs[1::2])
            mean, most = sum(errors) / len(errors), errors[int(0.95 * len(errors))]
            print(f"| {name} | {len(errors)} | {mean:.1%} | {most:.1%} | {taken_s:.2f} |")
    worker.terminate()
    worker.join()


def lane(head_dim: int, query_heads: int) -> Heads:
    """The heads of one GPU of a stage, with one attention worker."""
    devices = tuple(HeadDevice(worker=name, blocks=BLOCKS, profile=NOTHING_KNOWN) for name in (OWN, WORKER))
    shape = CacheShape(Part(0, LAYERS, 0, 8), head_dim, torch.float32, torch.device("cpu"))
    shown = HeadLane(
        worker=OWN,
        layers=LAYERS,
        heads=8,
        query_heads=query_heads,
        head_bytes=float(shape.bytes_per_token_cell),
        devices=devices,
    )
    return Heads(0, shown, shape, BLOCK_TOKENS, lambda _: None)


def serve(port: int) -> None:
    """The process of the attention worker."""
    stream = socket.create_connection(("127.0.0.1", port))
    AttentionServer({OWN: BLOCKS}, BLOCK_TOKENS, "cpu", 1).serve(Connection(stream), OWN)


def off(profile: DeviceProfile, run: AttentionRun) -> float:
    """How far the model is off for a run, as a share of its time."""
    predicted_s = profile.head_s * run.heads + profile.kv_byte_s * run.kv_bytes + profile.fixed_s
    return abs(predicted_s / run.seconds - 1)


if __name__ == "__main__":
    main()
