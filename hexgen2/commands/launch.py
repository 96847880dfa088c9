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
from hexgen2.commands.options import PATH, POSITIVE, Command, Number, options, setting, settings_of
from hexgen2.schedulers import (
    LENGTHS_HELP,
    OUTPUT_LENGTHS,
    PATH_SCHEDULERS,
    PATHS_HELP,
    SCHEDULER_HELP,
    SCHEDULERS,
)
from hexgen2.terminal import quiet
from runtime.options import (
    DEFAULTS,
    DTYPES,
    ENGINES,
    FRONT_DEFAULTS,
    INSTRUCTIONS,
    KV_CACHE_DTYPES,
    KV_TRANSPORTS,
    REPLAN_AFTER_S,
    RESTARTS,
    TORCH,
    EngineOptions,
    FrontOptions,
)

if TYPE_CHECKING:
    from runtime.p2p.membership.membership import Membership


_HOST = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?")
_SECONDS = Number(0, min_open=True)
_what, _server, _failures = options("What to run"), options("Server"), options("When replicas are lost")
_output, _nodes, _detail = options("Output"), options("Network of nodes (p2p)"), options("Engine details")
_front = partial(setting, "Scheduling", FRONT_DEFAULTS)
_engine = partial(setting, "Engine details", DEFAULTS)
_limit = partial(setting, "Limits", FRONT_DEFAULTS, metavar="N")


@click.command(
    cls=Command,
    short_help="Serve a placement behind the OpenAI API.",
    examples=(
        "hexgen2 launch placement.json --model-path /models/llama-3-8b",
        "hexgen2 launch placement.json --engine emulated --port 9000",
        "hexgen2 launch placement.json --launcher p2p --model-path /models/llama-3-8b --mdns \\\n"
        "      --listen /ip4/10.0.0.1/tcp/9000 --network-key network.key",
    ),
)
@click.argument("placement", type=PATH)
@_what("--model-path", type=PATH, metavar="DIR", help="Folder of the checkpoint.")
@_what(
    "--engine",
    type=click.Choice(ENGINES),
    default=TORCH,
    show_default=True,
    help="emulated: no model; tokens without meaning, at the times of the cost model.",
)
@_what(
    "--launcher",
    type=click.Choice(["local", "p2p", "ray"]),
    default="local",
    show_default=True,
    help="Start workers on this machine, on nodes (`hexgen2 node`), or in a Ray cluster.",
)
@_server("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Address to listen on.")
@_server(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    metavar="PORT",
    help="0: any free port.",
)
@_server(
    "--api-key",
    envvar="HEXGEN2_API_KEY",
    multiple=True,
    metavar="KEY|@FILE|-",
    help="Clients must send one of these as a bearer token; repeatable. @FILE: its first line; -: ask.",
)
@_server(
    "--api-keys",
    type=PATH,
    metavar="FILE",
    help="File with further keys, one per line: `name: key`, or a key. Logs and metrics show names only.",
)
@_server(
    "--operator-key",
    envvar="HEXGEN2_OPERATOR_KEY",
    metavar="KEY|@FILE|-",
    help="Key for /metrics, /requests, /placement and /replan.  [default: only this machine may use them]",
)
@_server(
    "--allowed-hosts",
    multiple=True,
    metavar="NAME,...",
    help="Host names under which clients may address the server.  [default: this machine's own; any with "
    "--api-key, or with a --host that others reach]",
)
@_server(
    "--cors-origin",
    multiple=True,
    metavar="ORIGIN",
    help="Website whose pages may call the API, such as https://chat.example.org; repeatable.",
)
@_server(
    "--shift-load/--no-shift-load",
    default=FRONT_DEFAULTS.shift_load,
    show_default=True,
    help="Move shares of routes when requests wait and are longer or shorter than planned.",
)
@_front(
    "--scheduler",
    click.Choice(list(SCHEDULERS | PATH_SCHEDULERS)),
    f"{SCHEDULER_HELP} {PATHS_HELP}",
)
@_front("--output-lengths", click.Choice(list(OUTPUT_LENGTHS)), LENGTHS_HELP)
@_failures(
    "--restarts",
    type=click.IntRange(0),
    default=RESTARTS,
    show_default=True,
    metavar="N",
    help="How often in a row a lost replica is restarted; 0: never.",
)
@_failures("--replan", is_flag=True, help="Switch to a new placement that does without the lost GPUs.")
@_failures(
    "--replan-after-s",
    type=POSITIVE,
    default=REPLAN_AFTER_S,
    show_default=True,
    metavar="S",
    help="How long --replan waits for further losses, or for a lost node to come back.",
)
@_output(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the log on stderr, one event per line. HEXGEN2_LOG=INFO logs every request's route.",
)
@_output(
    "--otlp-endpoint", default="", metavar="URL", help="Send traces to this OpenTelemetry collector (HTTP)."
)
@_nodes("--join", multiple=True, metavar="MULTIADDR", help="Address of a node of the network; repeatable.")
@_nodes("--mdns", is_flag=True, help="Find nodes on the local network; --listen says on which.")
@_nodes("--listen", metavar="MULTIADDR", help="Address to listen on.  [default: loopback, any port]")
@_nodes("--network-key", type=PATH, metavar="FILE", help="File of the network's key.")
@_nodes("--identity", type=PATH, metavar="FILE", help="File of this peer's key pair; made if missing.")
@_nodes("--allow", multiple=True, metavar="PEERID", help="Let in only these members; repeatable.")
@_engine(
    "--dtype",
    click.Choice(DTYPES),
    "Data type of computations and KV caches, and on GPUs of weights; CPUs keep weights in 16 bits where the "
    "checkpoint does. auto: float32 if any worker runs on a CPU, else the checkpoint's.",
)
@_engine(
    "--kv-cache-dtype",
    click.Choice(KV_CACHE_DTYPES),
    "How KV caches are stored. plain: in --dtype. auto: fp8 or int8 if the placement plans that, else plain.",
)
@_engine(
    "--chunk-tokens",
    click.IntRange(1),
    "Most prompt tokens in a step that also decodes.  [default: the placement's]",
    metavar="N",
)
@_detail(
    "--prefix-caching/--no-prefix-caching",
    "reuse_prefixes",
    default=True,
    show_default=True,
    help="Share the KV cache of common prompt prefixes.",
)
@_engine(
    "--kv-transport",
    click.Choice(KV_TRANSPORTS),
    "How KV caches move between workers. auto: the fastest that both sides support.",
)
@_detail(
    "--cpu-instructions",
    type=click.Choice(INSTRUCTIONS),
    default=INSTRUCTIONS[0],
    show_default=True,
    help="avx2: local workers use no wider instructions, so that different processors round alike.",
)
@_detail(
    "--measure-heads",
    is_flag=True,
    help="Dispatch KV heads to attention workers by times measured at the start, not by the cost model's.",
)
@_engine(
    "--cuda-devices",
    click.IntRange(1),
    "Serve on the first N CUDA devices of this machine, several GPUs of the placement on each if it has more."
    "  [default: each GPU is a device]",
    metavar="N",
)
@_detail("--emulate-links", is_flag=True, help="Move KV caches no faster than the placement's links.")
@_engine(
    "--kv-scale",
    Number(1),
    "The emulated engine sends one byte in N, in the time that all of them would take.",
    metavar="N",
)
@_limit("--queue-limit", click.IntRange(0), "Requests that may wait; more are rejected.")
@_limit(
    "--client-queue-limit",
    click.IntRange(0),
    "Requests that one client (an API key or an address) may have waiting.  [default: same as --queue-limit]",
)
@_limit("--queue-timeout-s", _SECONDS, "How long a request may wait before it starts.")
@_limit(
    "--kv-high-water",
    Number(0, 1, min_open=True),
    "Admit requests up to this share of the KV cache, including their expected growth.  [default: 1; 0.9 "
    "for ranges of layers]",
)
@_limit("--max-body-bytes", click.IntRange(1), "Bytes of one request body.")
@_limit("--max-total-body-bytes", click.IntRange(1), "Bytes of all in-flight request bodies together.")
@_limit("--max-choices", click.IntRange(1), "Answers per request: prompts times n.")
@_limit("--max-prompt-tokens", click.IntRange(1), "Prompt tokens per request, counted once for each answer.")
@_limit("--max-messages", click.IntRange(1), "Messages per chat, and content parts in these messages.")
@_limit("--max-stop-strings", click.IntRange(1), "Stop strings per request.")
@_limit("--max-stop-length", click.IntRange(1), "Characters per stop string.")
@_limit("--max-stop-token-ids", click.IntRange(1), "Stop tokens per request.")
@_limit("--max-logit-bias", click.IntRange(1), "Tokens in logit_bias per request.")
@_limit("--max-connections", click.IntRange(1), "Open connections.")
@_limit(
    "--max-address-connections",
    click.IntRange(1),
    "Open connections from one address.  [default: nine tenths of --max-connections]",
)
@_limit(
    "--read-timeout-s", _SECONDS, "How long the headers of a request may take to arrive, and then its body."
)
@_limit("--write-timeout-s", _SECONDS, "How long a client may stop reading its answer.")
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
    """Start the replicas of a placement, on this machine or on nodes, and serve the OpenAI API."""
    from hexgen2.placement import Placement

    loaded = Placement.load(placement)
    try:
        from runtime import logs
        from runtime.api.keys import check_operator_key, collect, read_key
        from runtime.launcher.processes import limit_instructions
        from runtime.operator import be_quiet
        from runtime.serve import serve
    except ModuleNotFoundError as error:
        raise InputError(
            "hexgen2 launch", "", f"needs {error.name}", "pip install 'hexgen2[runtime]'"
        ) from error
    if quiet():
        be_quiet()
    keys = {"identity": identity, "network_key": network_key, "allow": allow}
    membership = _membership(launcher, join=join, listen=listen, mdns=mdns, **keys)
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
        options=settings_of(EngineOptions, settings),
        restarts=restarts,
        front=front,
        replan_after_s=replan_after_s if replan else None,
        membership=membership,
    )
    sys.exit(code)


def _ask(what: str) -> str:
    return click.prompt(what, hide_input=True, err=True)


def checked_hosts(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """The names of --allowed-hosts, each of which may list several with commas; None if there are none."""
    found = [name.strip().lower() for each in names for name in each.split(",")]
    for name in found:
        if name != "*" and not _HOST.fullmatch(name):
            raise InputError(
                "--allowed-hosts", "", f"{name!r} is not a host name", "write it without port or path"
            )
    return tuple(found) or None


def checked_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Origins of --cors-origin."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            remedy = "write it as browsers do: https://chat.example.org"
            raise InputError("--cors-origin", "", f"{origin!r} is not an origin", remedy)
    return origins


def _membership(launcher: str, **asked: Any) -> Membership | None:
    """What the p2p launcher needs to join the network of its nodes; None for other launchers."""
    if launcher == "p2p":
        from runtime.p2p.membership.membership import IDENTITIES, LOOPBACK_LISTEN, Membership

        defaults = {"identity": IDENTITIES / "head.key", "listen": LOOPBACK_LISTEN}
        return Membership(**asked | {name: asked[name] or value for name, value in defaults.items()})
    for name, value in asked.items():
        if value:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                option, "", "only applies to --launcher p2p", "add --launcher p2p, or leave this option out"
            )
    return None
