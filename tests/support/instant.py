"""A real server over real sockets, in a thread, with a replica that answers at once with made-up tokens."""

import asyncio
import threading
from contextlib import contextmanager
from functools import partial

import uvicorn
from served import make_placement

from runtime.api.app import create_app
from runtime.api.connection import limited_by
from runtime.api.metrics import Metrics
from runtime.api.service import Service
from runtime.api.tokenizer import ModelTokenizer
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replica import Replica
from runtime.options import FRONT_DEFAULTS
from runtime.protocol.from_workers import Released, StepOutput, TokenOutput
from runtime.protocol.message import TokenLogprobs
from runtime.protocol.to_workers import Cancel, Prefill
from runtime.routing.router import Route, Router

FIRST_TOKEN = 10


class Instant:
    """A link to a replica that takes no time: output token n is FIRST_TOKEN + n % 50."""

    heard = 0

    def send(self, message):
        if isinstance(message, Prefill):
            asyncio.get_running_loop().call_soon(self.play, message)
        elif isinstance(message, Cancel):
            self.answer(Released(request_id=message.request_id, replica="c"))

    def play(self, asked):
        sampling = asked.sampling
        for index in range(sampling.max_tokens):
            last = index + 1 == sampling.max_tokens
            logprobs = TokenLogprobs(chosen=-0.5, top=((11, -0.5), (12, -2.0))[: max(sampling.logprobs, 0)])
            output = TokenOutput(
                request_id=asked.request_id,
                index=index,
                token=FIRST_TOKEN + index % 50,
                finish_reason="length" if last else "",
                logprobs=logprobs if sampling.logprobs >= 0 else None,
            )
            self.answer(StepOutput(replica="c", outputs=(output,)))
        self.answer(Released(request_id=asked.request_id, replica="c"))


def limited_server(app, options):
    """Serve this app on a free port, with the client limits that the options set."""
    config = uvicorn.Config(
        app,
        port=0,
        log_level="critical",
        lifespan="off",
        ws="none",
        http=limited_by(options),
    )
    return uvicorn.Server(config)


@contextmanager
def instant_server(folder, options=FRONT_DEFAULTS, **coordination):
    """The URL of a server, and its coordinator."""
    link, metrics = Instant(), Metrics()
    replica = Replica("c", "colocated", "box/0", {"box/0": link}, 512, 4)
    coordinator = Coordinator(Router([Route("c", "c", 1.0)]), {"c": replica}, metrics, **coordination)
    metrics.watch(coordinator)
    link.answer = partial(coordinator._in_flight.handle, replica)
    service = Service(make_placement(folder), coordinator, ModelTokenizer.load(folder), metrics, options)
    server = limited_server(create_app(service), options)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}", coordinator
    finally:
        server.should_exit = server.force_exit = True
        thread.join(30)
