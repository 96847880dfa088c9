"""The server's edge without a fleet: an application behind the gate, and raw connections to it."""

import asyncio
import json

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from instant import limited_server

from runtime.api import errors
from runtime.api.access import AccessControl
from runtime.options import FrontOptions
from runtime.routing.refusals import Overloaded

POST = b"POST /v1/echo HTTP/1.1\r\nhost: here\r\nauthorization: Bearer sesame\r\n"


def check_place(client):
    """Check whether the queue has a place; it never has one for the client `baba`."""
    if client == "baba":
        raise Overloaded("nine requests are waiting already")


def app(options, endless):
    app = FastAPI()
    errors.install(app)
    app.add_middleware(AccessControl, options=options, check_place=check_place)

    @app.post("/v1/completions")
    @app.post("/v1/echo")
    async def echo(request: Request):
        origin = request.state.origin
        return {"bytes": len(await request.body()), "client": origin.client, "timeout_s": origin.timeout_s}

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    @app.get("/shown")
    @app.post("/shown")
    async def shown():
        return {}

    @app.get("/v1/late")
    async def late():
        await asyncio.sleep(0.5)
        return {"late": True}

    @app.get("/v1/wait")
    async def wait(request: Request):
        while (await request.receive())["type"] != "http.disconnect":
            pass
        endless.set()
        return {}

    @app.get("/endless")
    async def endless_stream():
        async def chunks():
            try:
                while True:
                    yield b"x" * 65536
                    await asyncio.sleep(0)
            finally:
                endless.set()

        return StreamingResponse(chunks())

    return app


def talk(scenario, **options):
    """Run a scenario against a server with these limits; the scenario gets a function that opens a
    connection."""

    async def limited():
        chosen = FrontOptions(**{"api_keys": {"ali": "sesame", "baba": "open"}, **options})
        endless = asyncio.Event()
        server = limited_server(app(chosen, endless), chosen)
        server.install_signal_handlers = lambda: None
        serving = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(60):
                await scenario(lambda: asyncio.open_connection("127.0.0.1", port), endless)
        finally:
            server.should_exit = server.force_exit = True
            await serving

    asyncio.run(limited())


async def answer(reader):
    """Status, headers and JSON body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    return int(head[0].split()[1]), headers, body


def refused(status, answered):
    got, headers, body = answered
    assert got == status, answered
    assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]
    return headers
