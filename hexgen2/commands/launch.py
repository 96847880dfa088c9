"""`hexgen2 launch`: a placement on this machine, behind the OpenAI API: the one way into the runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cost_model.errors import InputError
from runtime.options import DEFAULTS, DTYPES, KV_TRANSPORTS, EngineOptions


@click.command()
@click.argument("placement", type=click.Path(path_type=Path))
@click.option("--model-path", type=click.Path(path_type=Path), help="The checkpoint's folder.")
@click.option("--engine", type=click.Choice(["torch"]), default="torch", show_default=True)
@click.option("--launcher", type=click.Choice(["local"]), default="local", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--api-key", envvar="HEXGEN2_API_KEY", help="Clients must send it as a bearer token.")
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
@click.option("--emulate-links", is_flag=True, help="Move KV caches no faster than the placement's links.")
def launch(
    placement: Path,
    model_path: Path | None,
    engine: str,
    launcher: str,
    host: str,
    port: int,
    api_key: str | None,
    dtype: str,
    chunk_tokens: int,
    prefix_caching: bool,
    kv_transport: str,
    emulate_links: bool,
) -> None:
    """Start a placement's replicas on this machine and serve the OpenAI API."""
    from hexgen2.placement import Placement

    loaded = Placement.load(placement)
    try:
        from runtime.serve import serve
    except ModuleNotFoundError as error:
        raise InputError(
            "hexgen2 launch", "", f"needs {error.name}", "pip install 'hexgen2[runtime]'"
        ) from error
    options = EngineOptions(
        dtype=dtype,
        chunk_tokens=chunk_tokens,
        reuse_prefixes=prefix_caching,
        kv_transport=kv_transport,
        emulate_links=emulate_links,
    )
    where = {"launcher": launcher, "engine": engine, "source": str(placement)}
    sys.exit(serve(loaded, model_path, host, port, api_key, **where, options=options))
