"""Who is let in, and under which name; and clients that close half of a connection, or all of it."""

import asyncio

import httpx
import pytest
from edge import POST, answer, refused, talk
from instant import instant_server

from runtime.api.access import hosts_of
from runtime.api.connection import site_of
from runtime.options import FrontOptions

OPEN = {"api_keys": {}}
SHOWN = b"GET /shown HTTP/1.1\r\nhost: here\r\n"


async def status_of(connect, request):
    """The status of the answer to a request on a new connection."""
    reader, writer = await connect()
    writer.write(request)
    found = await answer(reader)
    writer.close()
    if found[0] >= 400:
        refused(found[0], found)
    return found[0]


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        ((), "127.0.0.1:8000", 200),
        ((), "localhost", 200),
        ((), "LOCALHOST.:80", 200),
        ((), "[::1]:8000", 200),
        ((), "127.9.9.9", 200),
        ((), "app.localhost", 200),
        ((), "evil.example", 403),
        ((), "localhost.evil.example", 403),
        ((), "127.0.0.1.evil.example:80", 403),
        ((), "evil.example:80@localhost", 403),
        ((), "10.0.0.4", 403),
        ((), "", 403),
        (("llm.here",), "llm.here:443", 200),
        (("llm.here",), "localhost", 200),
        (("llm.here",), "not.llm.here", 403),
        (("*",), "evil.example", 200),
        (None, "evil.example", 200),
    ],
)
def test_a_server_is_asked_under_its_own_names(allowed, host, status):
    async def scenario(connect, _):
        request = b"POST /v1/echo HTTP/1.1\r\nhost: %b\r\ncontent-length: 0\r\n\r\n" % host.encode()
        assert await status_of(connect, request) == status
        assert await status_of(connect, request.replace(b"POST /v1/echo", b"GET /health")) == status

    talk(scenario, allowed_hosts=allowed, **OPEN)


@pytest.mark.parametrize(
    ("keys", "given", "host", "allowed"),
    [
        ({}, None, "127.0.0.1", ()),
        ({}, None, "::1", ()),
        ({}, ("llm.here",), "127.0.0.1", ("llm.here",)),
        ({}, None, "0.0.0.0", None),
        ({"ali": "sesame"}, None, "127.0.0.1", None),
        ({"ali": "sesame"}, ("llm.here",), "0.0.0.0", ("llm.here",)),
    ],
)
def test_names_are_checked_where_nothing_else_keeps_a_web_page_out(keys, given, host, allowed):
    assert hosts_of(FrontOptions(api_keys=keys, allowed_hosts=given), host) == allowed


@pytest.mark.parametrize("by", [b"x-forwarded-for: 10.0.0.9\r\n", b"forwarded: for=x\r\n", b"via: 1.1 p\r\n"])
def test_what_is_the_operators_is_shown_to_this_machine_alone_where_clients_have_keys(by):
    async def scenario(connect, _):
        assert await status_of(connect, SHOWN + b"\r\n") == 200
        assert await status_of(connect, SHOWN + by + b"\r\n") == 403
        assert await status_of(connect, SHOWN + by + b"authorization: Bearer sesame\r\n\r\n") == 403
        change = SHOWN.replace(b"GET", b"POST") + b"content-length: 0\r\n"
        assert await status_of(connect, change + b"\r\n") == 401
        assert await status_of(connect, change + b"authorization: Bearer sesame\r\n\r\n") == 200

    talk(scenario)


@pytest.mark.parametrize("keys", [{}, {"ali": "sesame"}])
def test_an_operators_key_is_asked_for_where_there_is_one(keys):
    async def scenario(connect, _):
        for method in (b"GET", b"POST"):
            request = SHOWN.replace(b"GET", method) + b"content-length: 0\r\n"
            for key, status in ((b"mine", 200), (b"sesame", 401), (b"", 401)):
                asked = request + b"authorization: Bearer " + key + b"\r\nx-forwarded-for: 10.0.0.9\r\n\r\n"
                assert await status_of(connect, asked) == status
        client = POST.replace(b"sesame", b"mine") + b"content-length: 0\r\n\r\n"
        assert await status_of(connect, client) == (401 if keys else 200)

    talk(scenario, api_keys=keys, operator_key="mine")


def test_head_is_get_without_a_body():
    async def scenario(connect, _):
        reader, writer = await connect()
        for path, status in ((b"/health", 200), (b"/nothing", 404), (b"/v1/echo", 405)):
            writer.write(b"HEAD %b HTTP/1.1\r\nhost: here\r\n\r\n" % path)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == b"%d" % status and b"content-length: " in head
        writer.write(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
        assert await answer(reader) != b""
        writer.close()

    talk(scenario, **OPEN)


def test_pages_of_named_sites_may_ask(model_folder):
    options = FrontOptions(cors_origin=("https://chat.here",), api_keys={"ali": "sesame"})
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with instant_server(model_folder, options) as (url, _), httpx.Client(base_url=url) as http:
        for origin, let_in in (("https://chat.here", True), ("https://evil.example", False)):
            asked = http.options("/v1/completions", headers={"Origin": origin, **wanted})
            assert (asked.headers.get("access-control-allow-origin") == origin) is let_in
            refusal = http.get("/v1/models", headers={"Origin": origin})
            assert refusal.status_code == 401
            assert (refusal.headers.get("access-control-allow-origin") == origin) is let_in
            key = {"Origin": origin, "Authorization": "Bearer sesame"}
            assert http.get("/v1/models", headers=key).status_code == 200
    with instant_server(model_folder) as (url, _):
        asked = httpx.options(f"{url}/v1/completions", headers={"Origin": "https://chat.here", **wanted})
        assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers


def without_interim(data):
    """The received bytes without interim answers."""
    while data.startswith(b"HTTP/1.1 100"):
        data = data.partition(b"\r\n\r\n")[2]
    return data


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("path", [b"/health", b"/v1/late"])
def test_a_client_that_sends_no_more_is_answered(version, path):
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(b"GET %b HTTP/%b\r\nhost: here\r\nauthorization: Bearer open\r\n\r\n" % (path, version))
        writer.write_eof()
        found = without_interim(await reader.read())
        assert found.startswith(b"HTTP/1.1 200") and found.endswith(b"}")
        writer.close()

    talk(scenario)


def test_requests_before_the_end_are_all_answered():
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write((b"GET /v1/late HTTP/1.1\r\nhost: here\r\n" + b"authorization: Bearer open\r\n\r\n") * 3)
        writer.write_eof()
        assert (await reader.read()).count(b'{"late":true}') == 3
        writer.close()

    talk(scenario)


def test_a_client_that_closes_all_of_it_is_found_out():
    async def scenario(connect, gone):
        _, writer = await connect()
        writer.write(b"GET /v1/wait HTTP/1.1\r\nhost: here\r\nauthorization: Bearer open\r\n\r\n")
        await asyncio.sleep(0.2)
        assert not gone.is_set()
        writer.close()
        await gone.wait()

    talk(scenario)


@pytest.mark.parametrize(
    "part",
    [b"POST /v1/ec", POST, POST + b"content-length: 10\r\n\r\nabc", POST + b"content-length: 10\r\n\r\n"],
)
def test_an_end_within_a_request_is_said(part):
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(part)
        await asyncio.sleep(0.05)
        writer.write_eof()
        refused(400, await answer(reader))
        assert await reader.read() == b""
        writer.close()

    talk(scenario)


def test_one_address_has_not_all_connections():
    async def scenario(connect, _):
        held = [await connect() for _ in range(2)]
        await asyncio.sleep(0.1)
        reader, writer = await connect()
        assert int(refused(429, await answer(reader))["retry-after"]) > 0
        writer.close()
        held.pop()[1].close()
        while await status_of(connect, b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n") == 429:
            await asyncio.sleep(0.05)
        held.pop()[1].close()

    talk(scenario, max_address_connections=2)


def test_bodies_together_have_an_end():
    async def scenario(connect, _):
        slow = [await connect() for _ in range(3)]
        for _, writer in slow:
            writer.write(POST + b"content-length: 1000\r\n\r\n" + b"x" * 900)
        await asyncio.sleep(0.1)
        whole = POST + b"content-length: 500\r\n\r\n" + b"x" * 500
        assert await status_of(connect, whole) == 503
        for reader, writer in slow:
            writer.write(b"x" * 100)
            assert (await answer(reader))[2]["bytes"] == 1000
            writer.close()
        assert await status_of(connect, whole) == 200

    talk(scenario, max_total_body_bytes=3100)


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),
        ("::1", "::/64"),
        ("x" * 1000, "x" * 64),
        ("", ""),
    ],
)
def test_an_address_or_its_net_is_a_client(address, site):
    assert site_of(address) == site
