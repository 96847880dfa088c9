"""Search a placement, launch it, talk to it and stop it, all in one go.

    make demo

Everything runs on this machine, on loopback: a cluster of eight CPU processes in two nodes, a model of 6
million parameters that the demo trains first, and the `openai` client.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

from openai import AsyncOpenAI, AsyncStream

FOLDER = Path(".demo")
COMMAND = str(Path(sys.executable).with_name("hexgen2"))
PROMPTS = [
    "A prefill replica",
    "A decode replica",
    "The KV cache moves",
    "A route leads",
    "Tensor parallelism",
    "Pipeline parallelism",
    "The router follows",
    "Mixed GPUs are",
    "Fast cards like",
    "Cards with much",
    "Time to first",
    "When nothing improves",
]
START_TIMEOUT_S = 180


def main() -> int:
    """Run all steps; return 0 only if every step worked."""
    FOLDER.mkdir(exist_ok=True)
    checkpoint, placement = FOLDER / "checkpoint", FOLDER / "placement.json"
    if not (checkpoint / "model.safetensors").exists():
        say("1. Train a small model to serve")
        subprocess.run([sys.executable, "examples/make_checkpoint.py", str(checkpoint)], check=True)
    say("2. Search for a placement on three fast and five slow CPU devices in two nodes")
    options = ["--cluster", "local-cpu", "--model", str(checkpoint), "--isl", "16", "--osl", "16"]
    # So short requests are served best where they begin; the demo shows how KV caches move.
    options += ["--phases", "disaggregated"]
    subprocess.run([COMMAND, "search", *options, "-o", str(placement)], check=True)
    say("3. Launch it: one process per device")
    port = free_port()
    launch = [COMMAND, "launch", str(placement), "--model-path", str(checkpoint), "--port", str(port)]
    server = subprocess.Popen(launch, start_new_session=True)
    try:
        wait_until_healthy(server, port)
        say("4. Send several prompts at once through the OpenAI API")
        asyncio.run(converse(f"http://127.0.0.1:{port}/v1"))
    finally:
        say("5. Stop it, as Ctrl-C does")
        server.send_signal(signal.SIGINT)
        code = server.wait(timeout=60)
    print(f"the server ended with exit code {code}")
    return code


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n== {text}", flush=True)


def free_port() -> int:
    """A TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(server: subprocess.Popen, port: int) -> None:
    """Wait until /health answers 200; raise if the server ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not become healthy")


async def converse(url: str) -> None:
    """Complete all prompts concurrently; print each text, its route and the KV-cache bytes moved."""
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        started = time.monotonic()
        answers = await asyncio.gather(*(complete(client, model, prompt) for prompt in PROMPTS))
        seconds = time.monotonic() - started
        tokens = moved = 0
        routes: Counter[str] = Counter()
        for prompt, text, used, where in answers:
            route = f"{where['prefill_replica']} -> {where['decode_replica']}"
            print(f"{route}, {where['kv_bytes'] / 1e3:5.1f} kB KV: {prompt}{text}")
            tokens, moved = tokens + used, moved + where["kv_bytes"]
            routes[route] += 1
        if not moved:
            raise SystemExit("no KV cache moved between replicas")
        print(
            f"\n{len(answers)} requests, {tokens} output tokens in {seconds:.2f} s; "
            f"{moved / 1e6:.2f} MB of KV cache moved"
        )
        print(", ".join(f"{route}: {count}" for route, count in sorted(routes.items())))
        print("One more, streamed from the chat API: ", end="")
        question = [{"role": "user", "content": "The spectral partition"}]
        stream = await client.chat.completions.create(
            model=model,
            messages=question,  # type: ignore[arg-type]
            max_tokens=32,
            temperature=0,
            stream=True,
        )
        assert isinstance(stream, AsyncStream)
        async for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


async def complete(client: AsyncOpenAI, model: str, prompt: str) -> tuple[str, str, int, dict]:
    """Request one completion; return the prompt, the text, the output tokens, and where it ran."""
    answer = await client.completions.create(model=model, prompt=prompt, max_tokens=32, temperature=0)
    used = answer.usage.completion_tokens if answer.usage else 0
    return prompt, answer.choices[0].text, used, json.loads(answer.model_dump_json())["hexgen2"]


if __name__ == "__main__":
    sys.exit(main())
