"""The server's edge over real sockets: keys, sizes, slow clients, and clients that do not read."""

import asyncio
import contextlib

import pytest
from edge import POST, answer, refused, talk

from cost_model.errors import InputError
from runtime.api.keys import KeyRing, collect
from runtime.options import FrontOptions


@pytest.mark.parametrize(("key", "client"), [("sesame", "ali"), ("open", "baba"), ("shut", None), ("", None)])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_has_its_client_and_others_are_refused(key, client, scheme):
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(b"POST /v1/echo HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n")
        writer.write(f"authorization: {scheme} {key}\r\nx-request-id: mine-7\r\n\r\nhi".encode())
        answered = await answer(reader)
        if client:
            assert answered[::2] == (200, {"bytes": 2, "client": client, "timeout_s": None})
        else:
            refused(401, answered)
            assert "sesame" not in str(answered)
        assert answered[1]["x-request-id"] == "mine-7"
        writer.close()

    talk(scenario)


def test_a_request_id_that_is_not_fit_for_a_log_is_replaced():
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(POST + b"content-length: 0\r\nx-request-id: a b=\x01\r\n\r\n")
        status, headers, _ = await answer(reader)
        assert status in (200, 400)
        if status == 200:
            assert len(headers["x-request-id"]) == 32
        writer.write(POST + b"content-length: 0\r\nx-request-id: " + b"a" * 65 + b"\r\n\r\n")
        if status == 200:
            assert len((await answer(reader))[1]["x-request-id"]) == 32
        writer.close()

    talk(scenario)


@pytest.mark.parametrize(
    ("given", "status"),
    [("2.5", 200), ("0", 400), ("-1", 400), ("soon", 400), ("nan", 400), ("inf", 400), ("1e9", 400)],
)
def test_the_clients_own_time_is_a_number_of_seconds(given, status):
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(POST + f"content-length: 0\r\nx-request-timeout-s: {given}\r\n\r\n".encode())
        answered = await answer(reader)
        if status == 200:
            assert answered[2]["timeout_s"] == 2.5
        else:
            refused(400, answered)
        writer.close()

    talk(scenario)


@pytest.mark.parametrize("body_first", [False, True])
def test_who_finds_no_place_is_told_so_whatever_the_body(body_first):
    async def scenario(connect, _):
        reader, writer = await connect()
        ask = b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 1400\r\n"
        ask += b"content-type: application/json\r\n"
        for key, status in ((b"open", 503), (b"sesame", 200), (b"open", 503)):
            writer.write(ask + b"authorization: Bearer " + key + b"\r\n\r\n")
            if body_first or status == 200:
                writer.write(b"x" * 1400)
            answered = await answer(reader)
            if status == 200:
                assert answered[0] == 200 and answered[2]["bytes"] == 1400
            else:
                assert int(refused(503, answered)["retry-after"]) >= 1
            if not body_first and status != 200:
                writer.write(b"x" * 1400)  # the connection still works
        writer.close()

    talk(scenario)


def chunked(size):
    return b"transfer-encoding: chunked\r\n\r\n" + f"{size:x}\r\n".encode() + b"x" * size + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"content-length: 2000\r\n\r\n" + b"x" * 2000, 413),
        (chunked(2000), 413),
        (b"content-length: 1000\r\n\r\n" + b"x" * 1000, 200),
        (chunked(1000), 200),
        (b"".join(b"x-%d: y\r\n" % n for n in range(101)) + b"\r\n", 431),
        (b"x: y\r\n" * 3000 + b"\r\n", 431),
        (b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 3000 + b"\r\n", 431),
        (b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1400 + b"0\r\n\r\n", 400),
        (b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n", 200),
        (b"x-long: " + b"y" * 200_000 + b"\r\n\r\n", 431),
        (b"x-a: " + b"y" * 20_000 + b"\r\nx-b: " + b"y" * 20_000 + b"\r\n\r\n", 431),
        (b"content-length: two\r\n\r\n", 400),
        (b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400),
        (b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"transfer-encoding: gzip\r\n\r\nabcd", 400),
        (b"no colon here\r\n\r\n", 400),
    ],
)
def test_sizes(rest, status):
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(POST + rest)
        answered = await answer(reader)
        if status == 200:
            assert answered[0] == 200 and answered[2]["bytes"] == 1000
        else:
            refused(status, answered)
        writer.close()

    talk(scenario, max_body_bytes=1500)


def test_a_thousand_requests_in_one_piece_are_too_many():
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write((POST + b"content-length: 0\r\n\r\n") * 1000)
        with contextlib.suppress(ConnectionError):
            assert (await reader.read()).count(b"HTTP/1.1 200") <= 128
        writer.close()
        reader, writer = await connect()
        writer.write((POST + b"content-length: 0\r\n\r\n") * 128)
        for _ in range(128):
            assert (await answer(reader))[0] == 200
        writer.close()

    talk(scenario)


def test_what_is_not_http_is_refused_and_cut():
    async def scenario(connect, _):
        for junk in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"\r\n\r\nGET\r\n\r\n", b"GET / HTTP\r\n\r\n"):
            reader, writer = await connect()
            writer.write(junk + b"\n" * 3)
            refused(400, await answer(reader))
            assert await reader.read() == b""
            writer.close()

    talk(scenario)


@pytest.mark.parametrize("piece", [b"x-more: y\r\n", b"y" * 100])
def test_headers_without_end_are_refused_while_they_come(piece):
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(POST + b"x-long: ")
        refusal = asyncio.create_task(answer(reader))
        with contextlib.suppress(ConnectionError):
            while not refusal.done():
                writer.write(piece * 10)
                await writer.drain()
                await asyncio.sleep(0.002)
        refused(431, await refusal)
        writer.close()

    talk(scenario)


def test_requests_that_come_together_are_answered_in_order():
    async def scenario(connect, _):
        reader, writer = await connect()
        sizes = [3, 0, 1500, 7]
        writer.write(b"".join(POST + b"content-length: %d\r\n\r\n" % size + b"x" * size for size in sizes))
        assert [(await answer(reader))[2]["bytes"] for _ in sizes] == sizes
        writer.close()

    talk(scenario)


@pytest.mark.parametrize("pieces", [1, 7])
def test_offers_of_another_protocol_are_passed_over(pieces):
    async def scenario(connect, _):
        reader, writer = await connect()
        offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
        for size in (2, 0, 1400):
            request = POST + offer + b"content-length: %d\r\n\r\n" % size + b"x" * size
            for at in range(pieces):
                writer.write(request[len(request) * at // pieces : len(request) * (at + 1) // pieces])
                await asyncio.sleep(0.01)
            status, _, body = await answer(reader)
            assert (status, body["client"], body["bytes"]) == (200, "ali", size)
        writer.close()

    talk(scenario)


@pytest.mark.parametrize("before", [b"", POST + b"content-length: 0\r\n\r\n"])
@pytest.mark.parametrize(
    ("target", "version"), [(b"http://here:1/", b"1.1"), (b"here:443", b"1.1"), (b"here:443", b"1.0")]
)
def test_connect_gets_one_answer_and_a_close(before, target, version):
    """Even with a tunnel's bytes behind it; other clients are served at once."""

    async def scenario(connect, _):
        reader, writer = await connect()
        if before:
            writer.write(before)
            assert (await answer(reader))[0] == 200
        writer.write(b"CONNECT %b HTTP/%b\r\nhost: here\r\n\r\n\x16\x03\x01" % (target, version))
        refused(405, await answer(reader))
        assert await reader.read() == b""
        writer.close()
        reader, writer = await connect()
        writer.write(POST + b"content-length: 2\r\n\r\nhi")
        assert (await answer(reader))[0] == 200
        writer.close()

    talk(scenario)


@pytest.mark.parametrize(
    "greeting",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        bytes.fromhex("16030100c8010000c40303") + bytes(200),
        b"BREW /pot HTTP/1.1\r\nhost: here\r\n\r\n",
        b"\x00" * 50,
    ],
)
def test_what_is_not_http_1_gets_one_answer_and_a_close(greeting):
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(greeting)
        refused(400, await answer(reader))
        assert await reader.read() == b""
        writer.close()

    talk(scenario)


def test_a_request_that_names_no_host_is_refused():
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(POST.replace(b"host: here\r\n", b"") + b"content-length: 0\r\n\r\n")
        refused(400, await answer(reader))
        writer.close()

    talk(scenario)


@pytest.mark.parametrize("headers_first", [False, True])
def test_a_client_that_trickles_is_sent_away(headers_first):
    async def scenario(connect, _):
        reader, writer = await connect()
        writer.write(POST + (b"content-length: 1000\r\n\r\n" if headers_first else b""))

        async def trickle():
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x" if headers_first else b"x-slow: y\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)

        slow = asyncio.create_task(trickle())
        refused(408, await answer(reader))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        slow.cancel()
        writer.close()

    talk(scenario, read_timeout_s=0.3)


def test_silence_after_connecting_or_between_requests_is_cut():
    async def scenario(connect, _):
        reader, writer = await connect()
        refused(408, await answer(reader))
        writer.close()
        reader, writer = await connect()
        writer.write(POST + b"content-length: 0\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(b"POST /ec")
        refused(408, await answer(reader))
        writer.close()

    talk(scenario, read_timeout_s=0.3)


def test_an_in_flight_request_is_not_cut_by_the_read_timeout():
    async def scenario(connect, endless):
        reader, writer = await connect()
        writer.write(POST.replace(b"POST /v1/echo", b"GET /endless") + b"\r\n")
        for _ in range(20):
            assert await reader.read(65536)
            await asyncio.sleep(0.05)
        writer.close()
        await endless.wait()

    talk(scenario, read_timeout_s=0.3)


def test_a_client_that_does_not_read_is_cut_and_its_stream_ends():
    async def scenario(connect, endless):
        _, writer = await connect()
        writer.write(POST.replace(b"POST /v1/echo", b"GET /endless") + b"\r\n")
        writer.transport.pause_reading()
        await endless.wait()
        writer.close()

    talk(scenario, write_timeout_s=0.3)


def test_connections_over_the_limit_are_told_so():
    async def scenario(connect, _):
        held = [await connect() for _ in range(3)]
        await asyncio.sleep(0.1)
        reader, writer = await connect()
        assert int(refused(503, await answer(reader))["retry-after"]) > 0
        for _, other in [*held, (reader, writer)]:
            other.close()
        status = 503
        while status == 503:
            await asyncio.sleep(0.05)
            reader, writer = await connect()
            writer.write(POST + b"content-length: 0\r\n\r\n")
            status = (await answer(reader))[0]
            writer.close()
        assert status == 200

    talk(scenario, max_connections=3)


# keys


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\nali: sesame\n  open  \nbaba: a:b:c\n")
    keys = collect(["first"], path)
    assert keys == {"key-1": "first", "ali": "sesame", "key-3": "open", "baba": "a:b:c"}
    ring = KeyRing(keys)
    assert [ring.name_of(key) for key in ("sesame", "a:b:c", "first", "", "sesam")] == [
        "ali",
        "baba",
        "key-1",
        None,
        None,
    ]
    assert "sesame" not in repr(FrontOptions(api_keys=keys))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["has no key"]),
        ("a: x\na: y\n", ["line 2", "a", "two keys"]),
        ("a: x\nb: x\n", ["line 2", "repeats another client's key"]),
        ("a: \n", ["line 1", "is not a valid key"]),
        ("a: x y\n", ["line 1", "is not a valid key"]),
        ("schlüssel\n", ["line 1", "is not a valid key"]),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_without_showing_a_key(tmp_path, text, words):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        collect([], path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_of_keys_that_is_missing_is_refused(tmp_path):
    with pytest.raises(InputError):
        collect([], tmp_path / "none")
