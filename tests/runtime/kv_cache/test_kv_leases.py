"""KV caches that do not arrive, with real workers: both sides free their blocks."""

import asyncio
import contextlib
import os
import signal
import socket
import threading

import pytest
from checkpoints import greedy, write_llama
from joined import BUDGET, PROMPT, TO_D, TO_E, ask, joined, run, settle, tell_addresses, tokens_of

from runtime.protocol.to_workers import ReserveKv
from runtime.routing.refusals import Unavailable

BLOCKS = BUDGET // 8
NEVER_S = 1000.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("leases") / "llama")


@pytest.fixture(scope="module")
def answer(folder):
    return greedy(folder, [PROMPT], 32)[0]


async def until_free(coordinator, *names):
    while not all(coordinator.replicas[name].free_blocks == BLOCKS for name in names):
        await asyncio.sleep(0.02)


class CutCable:
    """A port that forwards to another one until a number of bytes have passed; then the connection breaks,
    once."""

    def __init__(self, port, limit_bytes):
        self._port, self._left = port, limit_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.was_cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(512):
                self._left -= len(data)
                if self._left < 0 and not self.was_cut.is_set():
                    self.was_cut.set()
                    break
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()


def test_blocks_for_a_kv_cache_that_never_comes_are_free_after_the_lease(folder, answer):
    async def scenario():
        async with joined(folder, {"kv_lease_s": 0.5}) as (coordinator, _, links):
            for number in range(12):  # more in total than there are blocks
                links["d/0"].send(
                    ReserveKv(request_id=f"nobody's-{number}", prompt=tuple(range(1, 65)), capacity_tokens=80)
                )
                await asyncio.sleep(0.2)
            assert await tokens_of(ask(coordinator, TO_D)) == answer
            await settle(coordinator)
            await until_free(coordinator, "d")
            assert not coordinator.lost

    run(scenario)


def test_a_connection_cut_in_a_kv_cache_costs_nothing_but_a_resume(folder, answer):
    async def scenario():
        async with joined(folder, {"kv_transport": "tcp"}) as (coordinator, cluster, links):
            cable = CutCable(cluster.ports["d/1"], 1500)
            tell_addresses(cluster, links, **{"d/1": cable.port})
            requests = [ask(coordinator, TO_D) for _ in range(3)]
            for request in requests:
                assert await tokens_of(request) == answer
            assert cable.was_cut.is_set() and any(request.record.resumes for request in requests)
            await settle(coordinator)
            await until_free(coordinator, "p", "d")
            assert not coordinator.lost
            cable.close()

    run(scenario)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_receiver_that_takes_nothing_is_given_up_and_both_sides_are_free(folder, answer, transport):
    """Nothing pings the worker here: the transfer's own deadline detects it."""

    async def scenario():
        settings = {"kv_transport": transport}
        async with joined(folder, settings, ping_every_s=NEVER_S) as (coordinator, cluster, _):
            assert await tokens_of(ask(coordinator, TO_D)) == answer
            sender, receiver = (cluster.processes[name].pid for name in ("p/1", "d/1"))
            os.kill(sender, signal.SIGSTOP)
            request = ask(coordinator, TO_D, 120)
            while request.state.value == "reserving":
                await asyncio.sleep(0.01)
            os.kill(receiver, signal.SIGSTOP)
            os.kill(sender, signal.SIGCONT)
            assert await tokens_of(ask(coordinator, TO_E)) == answer
            while not request.record.resumes:
                await asyncio.sleep(0.05)
            await until_free(coordinator, "p")
            os.kill(receiver, signal.SIGCONT)
            assert (await tokens_of(request))[:32] == answer
            await settle(coordinator)
            await until_free(coordinator, "p", "d", "e")
            assert not coordinator.lost

    run(scenario)


def test_a_prefill_replica_killed_while_it_sends_leaves_no_block_behind(folder, answer):
    async def scenario():
        async with joined(folder) as (coordinator, cluster, _):
            requests = [ask(coordinator, None) for _ in range(8)]
            while not any(request.state.value == "prefilling" for request in requests):
                await asyncio.sleep(0)
            cluster.processes["p/1"].kill()
            for request in requests:
                try:
                    assert await tokens_of(request) == answer
                except Unavailable as error:
                    assert "replica p is lost" in str(error)
            await settle(coordinator)
            await until_free(coordinator, "d", "e")
            assert list(coordinator.lost) == ["p"]

    run(scenario)
