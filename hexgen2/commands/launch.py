"""`hexgen2 launch`: a placement, on this machine or on nodes, behind the OpenAI API."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cost_model.errors import InputError
from hexgen2.commands.options import POSITIVE, Number, setting, settings_of
from runtime.options import (
    DEFAULTS,
    DTYPES,
    ENGINES,
    FRONT_DEFAULTS,
    INSTRUCTIONS,
    KV_TRANSPORTS,
    REPLAN_AFTER_S,
    RESTARTS,
    TORCH,
    EngineOptions,
    FrontOptions,
)

if TYPE_CHECKING:
    from runtime.p2p.membership.membership import Membership


_PATH = click.Path(path_type=Path)
_HOST = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?")
_SECONDS = Number(0, min_open=True)
_engine, _front = partial(setting, DEFAULTS), partial(setting, FRONT_DEFAULTS)


@click.command()
@click.argument("placement", type=_PATH)
@click.option("--model-path", type=_PATH, help="The checkpoint's folder.")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default=TORCH,
    show_default=True,
    help="emulated: no model, tokens that mean nothing, in the cost model's time.",
)
@click.option("--launcher", type=click.Choice(["local", "p2p", "ray"]), default="local", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--api-key",
    envvar="HEXGEN2_API_KEY",
    multiple=True,
    help="Clients must send one as a bearer token. @FILE: its first line; -: asked for.",
)
@click.option(
    "--api-keys",
    type=_PATH,
    help="A file with more: `name: key`, or a key, on each line. Logs and metrics show names only.",
)
@click.option(
    "--operator-key",
    envvar="HEXGEN2_OPERATOR_KEY",
    help="For /metrics, /requests, /placement and /replan; given like --api-key.  "
    "[default: they are for this machine]",
)
@click.option(
    "--allowed-hosts",
    multiple=True,
    metavar="NAME",
    help="Names by which the server may be asked.  [default: this machine's own; any with --api-key, or with "
    "a --host that others reach]",
)
@click.option(
    "--cors-origin", multiple=True, metavar="ORIGIN", help="A site whose pages may ask, as https://chat.here."
)
@_front("--queue-limit", click.IntRange(0), "Requests that may wait for room.")
@_front(
    "--client-queue-limit",
    click.IntRange(0),
    "Requests of one client (its key, or its address) that may wait.  [default: as many]",
)
@_front("--queue-timeout-s", _SECONDS, "How long a request may wait before it starts.")
@_front(
    "--kv-high-water",
    Number(0, 1, min_open=True),
    "Share of the KV cache up to which requests are let in, with what they are expected to grow by.",
)
@_front("--max-body-bytes", click.IntRange(1), "Of one request.")
@_front("--max-total-body-bytes", click.IntRange(1), "Of all requests in work.")
@_front("--max-choices", click.IntRange(1), "Answers that one request asks for: prompts times n.")
@_front("--max-prompt-tokens", click.IntRange(1), "Of all answers that one request asks for.")
@_front("--max-messages", click.IntRange(1), "Of one chat, and so many parts of them.")
@_front("--max-stop-strings", click.IntRange(1), "Of one request.")
@_front("--max-stop-length", click.IntRange(1), "Characters of one stop string.")
@_front("--max-stop-token-ids", click.IntRange(1), "Of one request.")
@_front("--max-logit-bias", click.IntRange(1), "Tokens with a bias in one request.")
@_front("--max-connections", click.IntRange(1), "Open at a time.")
@_front("--max-address-connections", click.IntRange(1), "Of one address.  [default: nine in ten]")
@_front("--read-timeout-s", _SECONDS, "How long the headers of a request may take, and then its body.")
@_front("--write-timeout-s", _SECONDS, "How long a client may read nothing of what is sent to it.")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Of the log on stderr, one event a line. HEXGEN2_LOG=INFO shows every request's way.",
)
@click.option("--otlp-endpoint", default="", help="URL of an OpenTelemetry collector that takes traces.")
@_engine(
    "--dtype",
    click.Choice(DTYPES),
    "Of weights and KV cache. auto: float32 if a worker is a CPU, else the checkpoint's.",
)
@click.option(
    "--cpu-instructions",
    type=click.Choice(INSTRUCTIONS),
    default=INSTRUCTIONS[0],
    show_default=True,
    help="avx2: local workers use no wider ones, so that replicas on different processors round alike.",
)
@_engine("--chunk-tokens", click.IntRange(1), "Prompt tokens in a step in which requests decode, too.")
@click.option(
    "--prefix-caching/--no-prefix-caching",
    "reuse_prefixes",
    default=True,
    show_default=True,
    help="Let prompts share the KV cache of a common beginning.",
)
@_engine(
    "--kv-transport",
    click.Choice(KV_TRANSPORTS),
    "The way of KV caches between workers. auto: the best that both have.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=RESTARTS,
    show_default=True,
    help="How often in a row a lost replica is started again; 0: it stays lost.",
)
@click.option("--replan", is_flag=True, help="Search and take up another placement without what stays lost.")
@click.option(
    "--replan-after-s",
    type=POSITIVE,
    default=REPLAN_AFTER_S,
    show_default=True,
    help="How long --replan waits for further losses, and for a node that is gone.",
)
@click.option("--join", multiple=True, metavar="MULTIADDR", help="p2p: a node that is there already.")
@click.option(
    "--listen", metavar="MULTIADDR", help="p2p: where members are heard.  [default: loopback, any port]"
)
@click.option("--mdns", is_flag=True, help="p2p: find nodes on the local network; --listen says on which.")
@click.option("--identity", type=_PATH, help="p2p: file of the key pair.")
@click.option("--network-key", type=_PATH, help="p2p: file of the network's key.")
@click.option("--allow", multiple=True, metavar="PEERID", help="p2p: let in these members only.")
@click.option("--emulate-links", is_flag=True, help="Move KV caches no faster than the placement's links.")
@_engine("--kv-scale", Number(1), "The emulated engine moves one byte in so many, in the time of all.")
def launch(
    placement: Path,
    model_path: Path | None,
    engine: str,
    launcher: str,
    host: str,
    port: int,
    api_key: tuple[str, ...],
    api_keys: Path | None,
    operator_key: str | None,
    allowed_hosts: tuple[str, ...],
    cors_origin: tuple[str, ...],
    log_format: str,
    cpu_instructions: str,
    restarts: int,
    replan: bool,
    replan_after_s: float,
    join: tuple[str, ...],
    listen: str | None,
    mdns: bool,
    identity: Path | None,
    network_key: Path | None,
    allow: tuple[str, ...],
    **settings: Any,  # of EngineOptions and FrontOptions
) -> None:
    """Start a placement's replicas, on this machine or on nodes, and serve the OpenAI API."""
    from hexgen2.placement import Placement

    loaded = Placement.load(placement)
    try:
        from runtime import logs
        from runtime.api.keys import check_operator_key, collect, read_key
        from runtime.launcher.processes import limit_instructions
        from runtime.serve import serve
    except ModuleNotFoundError as error:
        raise InputError(
            "hexgen2 launch", "", f"needs {error.name}", "pip install 'hexgen2[runtime]'"
        ) from error
    keys = {"identity": identity, "network_key": network_key, "allow": allow}
    membership = _membership(launcher, join=join, listen=listen, mdns=mdns, **keys)
    options = settings_of(EngineOptions, settings)
    clients = collect([read_key(key, "--api-key", _ask) for key in api_key], api_keys)
    operator = read_key(operator_key or "", "--operator-key", _ask)
    if operator_key is not None:
        check_operator_key(operator, clients)
    front = settings_of(
        FrontOptions,
        settings,
        api_keys=clients,
        operator_key=operator,
        allowed_hosts=checked_hosts(allowed_hosts),
        cors_origin=checked_origins(cors_origin),
    )
    os.environ[logs.FORMAT_VARIABLE] = log_format  # workers inherit it
    limit_instructions(cpu_instructions)
    code = serve(
        *(loaded, model_path, host, port, launcher, engine, str(placement)),
        options=options,
        restarts=restarts,
        front=front,
        replan_after_s=replan_after_s if replan else None,
        membership=membership,
    )
    sys.exit(code)


def _ask(what: str) -> str:
    return click.prompt(what, hide_input=True, err=True)


def checked_hosts(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Names of --allowed-hosts, several of which may stand in one with commas; None without any."""
    found = [name.strip().lower() for each in names for name in each.split(",")]
    for name in found:
        if name != "*" and not _HOST.fullmatch(name):
            raise InputError(
                "--allowed-hosts", "", f"{name!r} is no host name", "write it without port or path"
            )
    return tuple(found) or None


def checked_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Origins of --cors-origin."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            problem, remedy = (
                f"{origin!r} is no origin",
                "write it as the browser does: https://chat.example.org",
            )
            raise InputError("--cors-origin", "", problem, remedy)
    return origins


def _membership(launcher: str, **options: Any) -> Membership | None:
    """The head's in the network of its nodes; other launchers have no use for it."""
    if launcher == "p2p":
        from runtime.p2p.membership.membership import IDENTITIES, LOOPBACK_LISTEN, Membership

        defaults = {"identity": IDENTITIES / "head.key", "listen": LOOPBACK_LISTEN}
        return Membership(**options | {name: options[name] or value for name, value in defaults.items()})
    for name, value in options.items():
        if value:
            option = f"--{name.replace('_', '-')}"
            raise InputError(option, "", "is for a network of nodes", "add --launcher p2p, or leave it out")
    return None
