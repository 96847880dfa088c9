"""What `hexgen2 launch` passes on from its options, without launching."""

from __future__ import annotations

import dataclasses
import inspect
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import hexgen2

import runtime.serve
from cost_model.errors import InputError
from hexgen2.commands.launch import launch
from hexgen2.placement import Placement
from runtime.logs import FORMAT_VARIABLE
from runtime.options import RESTARTS, EngineOptions, FrontOptions
from runtime.p2p.membership.membership import IDENTITIES, LOOPBACK_LISTEN, Membership

SERVE = inspect.signature(runtime.serve.serve)
ENGINE = EngineOptions(
    dtype="float16",
    kv_cache_dtype="int8",
    chunk_tokens=7,
    reuse_prefixes=False,
    kv_transport="tcp",
    emulate_links=True,
    kv_scale=3.0,
    measure_heads=True,
    cuda_devices=2,
)
FRONT = FrontOptions(
    queue_limit=5,
    client_queue_limit=4,
    queue_timeout_s=3.5,
    kv_high_water=0.5,
    shift_load=False,
    operator_key="sesame",
    allowed_hosts=("llm.here", "10.0.0.7"),
    cors_origin=("https://chat.here", "http://localhost:3000"),
    max_body_bytes=99,
    max_total_body_bytes=990,
    max_choices=3,
    max_prompt_tokens=1000,
    max_messages=9,
    max_stop_strings=5,
    max_stop_length=50,
    max_stop_token_ids=6,
    max_logit_bias=7,
    max_connections=12,
    max_address_connections=8,
    read_timeout_s=1.5,
    write_timeout_s=2.5,
    otlp_endpoint="http://collector",
    scheduler="workload-aware",
    output_lengths="distribution",
)


@pytest.fixture(scope="module")
def placement(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("launch") / "placement.json")
    asked = ["--cluster", "hexgen2-case-study", "--model", "llama-2-13b", "--workload", "LPLD"]
    done = hexgen2("search", *asked, "--phases", "disaggregated", "-o", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def served(placement, monkeypatch):
    """The arguments that `serve` is called with, by name."""
    monkeypatch.setenv(FORMAT_VARIABLE, "")
    monkeypatch.delenv("HEXGEN2_API_KEY", raising=False)

    def ask(*arguments):
        calls = []

        def serve(*values, **named):
            calls.append(SERVE.bind(*values, **named).arguments)
            return 0

        monkeypatch.setattr(runtime.serve, "serve", serve)
        done = CliRunner().invoke(launch, [placement, *arguments])
        assert done.exit_code == 0, done.output
        (call,) = calls
        return call

    return ask


def flags_of(options) -> list[str]:
    """The command-line flags for these options, without options that are None and without keys."""
    flags = []
    for name, value in dataclasses.asdict(options).items():
        flag = f"--{name.replace('_', '-')}"
        if name == "reuse_prefixes":
            flags.append("--prefix-caching" if value else "--no-prefix-caching")
        elif name == "shift_load":
            flags.append("--shift-load" if value else "--no-shift-load")
        elif isinstance(value, bool):
            flags += [flag] * value
        elif isinstance(value, tuple):
            flags += [part for each in value for part in (flag, each)]
        elif name not in ("block_tokens", "api_keys") and value is not None:
            flags += [flag, str(value)]
    return flags


def test_without_options_all_is_as_the_defaults_say(served, placement):
    call = served()
    assert call.pop("placement") == Placement.load(Path(placement))
    assert os.environ[FORMAT_VARIABLE] == "text"
    assert call == {
        "model_path": None,
        "host": "127.0.0.1",
        "port": 8000,
        "launcher": "local",
        "engine": "torch",
        "source": placement,
        "options": EngineOptions(),
        "front": FrontOptions(),
        "restarts": RESTARTS,
        "membership": None,
        "replan_after_s": None,
    }


def test_every_option_of_the_engine_arrives(served):
    left = {field.name for field in dataclasses.fields(EngineOptions)} - {"block_tokens"}
    assert all(getattr(ENGINE, name) != getattr(EngineOptions(), name) for name in left)
    call = served("--engine", "emulated", "--launcher", "ray", *flags_of(ENGINE))
    assert call["options"] == ENGINE and call["front"] == FrontOptions()
    assert (call["engine"], call["launcher"]) == ("emulated", "ray")


def test_every_option_of_the_front_end_arrives(served, tmp_path):
    left = {field.name for field in dataclasses.fields(FrontOptions)} - {"api_keys"}
    assert all(getattr(FRONT, name) != getattr(FrontOptions(), name) for name in left)
    keys = tmp_path / "keys"
    keys.write_text("alice: secret\n")
    more = ["--api-key", "open", "--api-keys", str(keys), "--log-format", "json"]
    call = served(*flags_of(FRONT), *more, "--host", "127.0.0.2", "--port", "0", "--model-path", "model")
    assert call["front"] == dataclasses.replace(FRONT, api_keys={"key-1": "open", "alice": "secret"})
    assert call["options"] == EngineOptions() and os.environ[FORMAT_VARIABLE] == "json"
    assert (call["model_path"], call["host"], call["port"]) == (Path("model"), "127.0.0.2", 0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--queue-timeout-s", "nan"),
        ("--read-timeout-s", "NaN"),
        ("--write-timeout-s", "0"),
        ("--kv-high-water", "nan"),
        ("--kv-scale", "nan"),
        ("--replan-after-s", "inf"),
    ],
)
def test_what_is_no_number_in_the_range_is_refused(placement, option, value):
    refused = CliRunner().invoke(launch, [placement, option, value])
    assert refused.exit_code == 2 and option in refused.output and value in refused.output


def test_a_limit_may_be_none_at_all(served):
    assert served("--queue-timeout-s", "inf")["front"].queue_timeout_s == float("inf")


def test_how_long_a_replan_waits_counts_only_with_one(served):
    assert served("--replan-after-s", "2", "--restarts", "1")["replan_after_s"] is None
    call = served("--replan", "--replan-after-s", "2", "--restarts", "1")
    assert call["replan_after_s"] == 2 and call["restarts"] == 1


def test_the_head_of_a_network_is_a_member_and_others_are_not(served):
    assert served("--launcher", "p2p")["membership"] == Membership(IDENTITIES / "head.key")
    options = ["--join", "a", "--join", "b", "--listen", "c", "--mdns", "--identity", "d"]
    options += ["--network-key", "e", "--allow", "f"]
    found = served("--launcher", "p2p", *options)["membership"]
    assert found == Membership(Path("d"), ("a", "b"), "c", Path("e"), ("f",), True)
    assert found.listen != LOOPBACK_LISTEN


@pytest.mark.parametrize("option", ["--join a", "--listen a", "--mdns", "--identity a", "--network-key a"])
def test_options_of_a_network_are_refused_without_one(placement, option):
    refused = CliRunner().invoke(launch, [placement, *option.split()]).exception
    assert isinstance(refused, InputError)
    line = (
        f"{option.split()[0]}: only applies to --launcher p2p; add --launcher p2p, or leave this option out"
    )
    assert str(refused) == line


def test_keys_come_from_a_file_or_are_asked_for(served, placement, tmp_path):
    file = tmp_path / "key"
    file.write_text("from-a-file\nnot this\n")
    assert served("--api-key", f"@{file}")["front"].api_keys == {"key-1": "from-a-file"}
    assert served("--operator-key", f"@{file}")["front"].operator_key == "from-a-file"
    asked = CliRunner().invoke(launch, [placement, "--operator-key", "-"], input="typed\n")
    assert asked.exit_code == 0 and "typed" not in asked.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--operator-key", "@nowhere"], "--operator-key: @nowhere: cannot be read"),
        (["--operator-key", "a b"], "--operator-key: is not a valid key"),
        (["--operator-key", "one", "--api-key", "one"], "is also the key of a client"),
        (["--allowed-hosts", "here:80"], "--allowed-hosts: 'here:80' is not a host name"),
        (["--cors-origin", "chat.here"], "--cors-origin: 'chat.here' is not an origin"),
    ],
    ids=str,
)
def test_keys_and_names_that_are_none_are_refused(placement, arguments, said):
    refused = CliRunner().invoke(launch, [placement, *arguments])
    assert isinstance(refused.exception, InputError) and said in str(refused.exception)
