"""`hexgen2 launch`: a placement, on this machine or on nodes, behind the OpenAI API."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cost_model.errors import InputError
from hexgen2.commands.options import POSITIVE
from runtime.options import (
    DEFAULTS,
    DTYPES,
    ENGINES,
    FRONT_DEFAULTS,
    KV_TRANSPORTS,
    REPLAN_AFTER_S,
    RESTARTS,
    TORCH,
    EngineOptions,
    FrontOptions,
)

if TYPE_CHECKING:
    from runtime.p2p.membership import Membership


@click.command()
@click.argument("placement", type=click.Path(path_type=Path))
@click.option("--model-path", type=click.Path(path_type=Path), help="The checkpoint's folder.")
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
    "--api-key", envvar="HEXGEN2_API_KEY", multiple=True, help="Clients must send one as a bearer token."
)
@click.option(
    "--api-keys",
    type=click.Path(path_type=Path),
    help="A file with more: `name: key`, or a key, on each line. Logs and metrics show names only.",
)
@click.option(
    "--queue-limit",
    type=click.IntRange(0),
    default=FRONT_DEFAULTS.queue_limit,
    show_default=True,
    help="Requests that may wait for room.",
)
@click.option(
    "--client-queue-limit",
    type=click.IntRange(0),
    help="Requests of one client (its key, or its address) that may wait.  [default: as many]",
)
@click.option(
    "--queue-timeout-s",
    type=click.FloatRange(0, min_open=True),
    default=FRONT_DEFAULTS.queue_timeout_s,
    show_default=True,
    help="How long a request may wait before it starts.",
)
@click.option(
    "--kv-high-water",
    type=click.FloatRange(0, 1, min_open=True),
    default=FRONT_DEFAULTS.kv_high_water,
    show_default=True,
    help="Share of the KV cache up to which requests are let in, with what they are expected to grow by.",
)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(1),
    default=FRONT_DEFAULTS.max_body_bytes,
    show_default=True,
    help="Of one request.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=FRONT_DEFAULTS.max_connections,
    show_default=True,
    help="Open at a time.",
)
@click.option(
    "--read-timeout-s",
    type=click.FloatRange(0, min_open=True),
    default=FRONT_DEFAULTS.read_timeout_s,
    show_default=True,
    help="How long the headers of a request may take, and then its body.",
)
@click.option(
    "--write-timeout-s",
    type=click.FloatRange(0, min_open=True),
    default=FRONT_DEFAULTS.write_timeout_s,
    show_default=True,
    help="How long a client may read nothing of what is sent to it.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Of the log on stderr, one event a line. HEXGEN2_LOG=INFO shows every request's way.",
)
@click.option("--otlp-endpoint", default="", help="URL of an OpenTelemetry collector that takes traces.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=DEFAULTS.dtype,
    show_default=True,
    help="Of weights and KV cache. auto: float32 if a worker is a CPU, else the checkpoint's.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(1),
    default=DEFAULTS.chunk_tokens,
    show_default=True,
    help="Prompt tokens in a step in which requests decode, too.",
)
@click.option(
    "--prefix-caching/--no-prefix-caching",
    default=True,
    show_default=True,
    help="Let prompts share the KV cache of a common beginning.",
)
@click.option(
    "--kv-transport",
    type=click.Choice(KV_TRANSPORTS),
    default=DEFAULTS.kv_transport,
    show_default=True,
    help="The way of KV caches between workers. auto: the best that both have.",
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
@click.option("--identity", type=click.Path(path_type=Path), help="p2p: file of the key pair.")
@click.option("--network-key", type=click.Path(path_type=Path), help="p2p: file of the network's key.")
@click.option("--allow", multiple=True, metavar="PEERID", help="p2p: let in these members only.")
@click.option("--emulate-links", is_flag=True, help="Move KV caches no faster than the placement's links.")
@click.option(
    "--kv-scale",
    type=click.FloatRange(1),
    default=DEFAULTS.kv_scale,
    show_default=True,
    help="The emulated engine moves one byte in so many, in the time of all.",
)
def launch(
    placement: Path,
    model_path: Path | None,
    engine: str,
    launcher: str,
    host: str,
    port: int,
    api_key: tuple[str, ...],
    api_keys: Path | None,
    queue_limit: int,
    client_queue_limit: int | None,
    queue_timeout_s: float,
    kv_high_water: float,
    max_body_bytes: int,
    max_connections: int,
    read_timeout_s: float,
    write_timeout_s: float,
    log_format: str,
    otlp_endpoint: str,
    dtype: str,
    chunk_tokens: int,
    prefix_caching: bool,
    kv_transport: str,
    restarts: int,
    replan: bool,
    replan_after_s: float,
    join: tuple[str, ...],
    listen: str | None,
    mdns: bool,
    identity: Path | None,
    network_key: Path | None,
    allow: tuple[str, ...],
    emulate_links: bool,
    kv_scale: float,
) -> None:
    """Start a placement's replicas, on this machine or on nodes, and serve the OpenAI API."""
    from hexgen2.placement import Placement

    loaded = Placement.load(placement)
    try:
        from runtime import logs
        from runtime.api.keys import collect
        from runtime.serve import serve
    except ModuleNotFoundError as error:
        raise InputError(
            "hexgen2 launch", "", f"needs {error.name}", "pip install 'hexgen2[runtime]'"
        ) from error
    keys = {"identity": identity, "network_key": network_key, "allow": allow}
    membership = _membership(launcher, join=join, listen=listen, mdns=mdns, **keys)
    options = EngineOptions(
        dtype=dtype,
        chunk_tokens=chunk_tokens,
        reuse_prefixes=prefix_caching,
        kv_transport=kv_transport,
        emulate_links=emulate_links,
        kv_scale=kv_scale,
    )
    front = FrontOptions(
        queue_limit=queue_limit,
        client_queue_limit=client_queue_limit,
        queue_timeout_s=queue_timeout_s,
        kv_high_water=kv_high_water,
        api_keys=collect(api_key, api_keys),
        max_body_bytes=max_body_bytes,
        max_connections=max_connections,
        read_timeout_s=read_timeout_s,
        write_timeout_s=write_timeout_s,
        otlp_endpoint=otlp_endpoint,
    )
    os.environ[logs.FORMAT_VARIABLE] = log_format  # workers inherit it
    how: dict[str, Any] = {"launcher": launcher, "engine": engine, "source": str(placement)}
    how |= {"options": options, "front": front, "restarts": restarts, "membership": membership}
    how["replan_after_s"] = replan_after_s if replan else None
    sys.exit(serve(loaded, model_path, host, port, **how))


def _membership(launcher: str, **options: Any) -> Membership | None:
    """The head's in the network of its nodes; other launchers have no use for it."""
    if launcher == "p2p":
        from runtime.p2p.membership import IDENTITIES, LOOPBACK_LISTEN, Membership

        defaults = {"identity": IDENTITIES / "head.key", "listen": LOOPBACK_LISTEN}
        return Membership(**options | {name: options[name] or value for name, value in defaults.items()})
    for name, value in options.items():
        if value:
            option = f"--{name.replace('_', '-')}"
            raise InputError(option, "", "is for a network of nodes", "add --launcher p2p, or leave it out")
    return None
