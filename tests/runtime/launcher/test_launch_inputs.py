"""User errors of `hexgen2 launch`: one line that states the place and the remedy, exit code 2."""

import json
import multiprocessing
import os
import re
import shutil
import socket

import psutil
import pytest
from commands import hexgen2, installed
from served import make_placement

from cost_model.errors import InputError
from runtime.serve import serve

RUN = "HEXGEN2_TEST_RUN"
"""An environment variable that marks all processes of a launch in a separate process."""
PROGRESS = re.compile(r"starting \d+ workers|\d+/\d+ workers ready")


@pytest.fixture
def files(model_folder, tmp_path):
    """The placement's file and the model's folder, for tests to damage."""
    path, model = tmp_path / "placement.json", tmp_path / "model"
    make_placement(model_folder).save(path)
    shutil.copytree(model_folder, model)
    return path, model


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def refusal(*arguments, run=hexgen2):
    """Launch with these arguments; return the lines of progress, and the one line of the refusal."""
    if "--port" not in arguments:
        arguments += ("--port", free_port())
    done = run("launch", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    *progress, line = done.stderr.splitlines()
    assert all(PROGRESS.fullmatch(each) for each in progress), done.stderr
    assert line.startswith("hexgen2: ") and ("; " in line or "--help" in line), line
    assert left_over() == []
    return progress, line


def left_over():
    """Processes that a launch of this test run has left behind."""
    found = [each for each in multiprocessing.active_children() if each.is_alive()]
    if found:
        return found
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN) == str(os.getpid()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [each for each in found if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def edited(path, edit):
    """Change a JSON file in place."""
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


# found before anything starts


def test_a_placement_file_that_is_missing(files):
    path, model = files
    path.unlink()
    progress, line = refusal(path, "--model-path", model, run=installed)
    assert not progress and str(path) in line and "hexgen2 search" in line


@pytest.mark.parametrize("text", ["", "{nope", "[]", '{"version": 1}'])
def test_a_placement_file_that_is_something_else(files, text):
    path, model = files
    path.write_text(text)
    progress, line = refusal(path, "--model-path", model)
    assert not progress and str(path) in line and "hexgen2 search" in line


def test_kv_caches_that_the_torch_engine_does_not_have(files):
    path, model = files
    edited(path, lambda values: values["model"].update(kv_value_bytes=0.5))
    progress, line = refusal(path, "--model-path", model)
    words = ["placement.json", "model.kv_type", "no KV caches in int4", "--kv-cache-dtype int8"]
    assert not progress and all(word in line for word in words), line
    progress, line = refusal(path, "--kv-cache-dtype", "int4")
    assert not progress and "--kv-cache-dtype" in line
    progress, line = refusal(path, "--engine", "emulated", "--kv-cache-dtype", "int8")
    assert not progress and "--kv-cache-dtype: int8" in line and "--engine torch" in line


def overlap(values):
    values["replicas"][1]["stages"][1]["layers"] = [2, 4]


def use_twice(values):
    values["replicas"][3]["stages"][0]["gpus"] = ["box/0"]


def need_h100(values):
    values["cluster"]["nodes"][0]["accelerators"] = "H100:6"
    values["cluster"]["accelerators"] = {}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            overlap,
            ["placement.json", "replicas[1].stages[1].layers", "starts at layer 2 where layer 3 is due"],
        ),
        (use_twice, ["placement.json", "replicas[3].stages[0].gpus", "'box/0' is used by replicas[0]"]),
        (need_h100, ["placement.json", "box/0", "needs cuda:0, but torch sees 0 CUDA devices here"]),
    ],
)
def test_a_placement_that_cannot_run_here(files, monkeypatch, edit, words):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path, model = files
    edited(path, edit)
    progress, line = refusal(path, "--model-path", model)
    assert not progress and all(word in line for word in words), line


def without_tokenizer(model):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).unlink()


def of_another_shape(model):
    edited(model / "config.json", lambda values: values.update(num_hidden_layers=3))


def with_a_broken_config(model):
    (model / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_tokenizer, ["has no tokenizer", "tokenizer.json"]),
        (of_another_shape, ["config.json", "layers", "is 3, but the placement was made for 4"]),
        (with_a_broken_config, ["config.json", "is not JSON"]),
        (shutil.rmtree, ["--model-path", "is not a folder"]),
    ],
)
def test_a_model_folder_that_does_not_fit(files, damage, words):
    path, model = files
    damage(model)
    progress, line = refusal(path, "--model-path", model)
    assert not progress and all(word in line for word in [str(model), *words]), line


def test_a_placement_whose_model_is_not_a_folder_needs_a_model_path(files):
    path, _ = files
    progress, line = refusal(path)
    assert not progress and "model.name" in line and "--model-path" in line


def test_a_busy_port(files):
    path, model = files
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        progress, line = refusal(path, "--model-path", model, "--port", port)
    assert not progress and f"127.0.0.1:{port}" in line and "choose another --port" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "not an address"], ["--host", "not an address", "give 127.0.0.1"]),
        (["--host", "192.0.2.1"], ["192.0.2.1", "choose an address of this machine with --host"]),
        (["--port", "70000"], ["--port", "70000"]),
        (["--engine", "steam"], ["--engine", "torch"]),
        (["--launcher", "ray", "--cuda-devices", "1"], ["--cuda-devices", "leave it out"]),
    ],
)
def test_wrong_options(files, options, words):
    path, model = files
    progress, line = refusal(path, "--model-path", model, *options)
    assert not progress and all(word in line for word in words), line


# found by the workers, or while they start


def truncated(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def with_a_broken_tokenizer(model):
    (model / "tokenizer.json").write_text("{}")


def with_a_broken_generation_config(model):
    (model / "generation_config.json").write_text("[")


@pytest.mark.parametrize(
    ("damage", "words", "run"),
    [
        (truncated, ["worker box/", "model.safetensors", "truncated", "checkpoint again"], installed),
        (with_a_broken_tokenizer, ["tokenizer", "restore the model's tokenizer files"], hexgen2),
        (with_a_broken_generation_config, ["generation_config.json", "restore the file"], hexgen2),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_leaves_no_process_and_no_port(
    files, damage, words, run, monkeypatch
):
    path, model = files
    damage(model)
    port = free_port()
    monkeypatch.setenv(RUN, str(os.getpid()))
    progress, line = refusal(path, "--model-path", model, "--port", port, run=run)
    assert progress[0] == "starting 6 workers" and all(word in line for word in [str(model), *words]), line
    with socket.create_server(("127.0.0.1", port)):
        pass


# not reachable from the command line


@pytest.fixture
def refuses(model_folder, monkeypatch):
    """Check that serve refuses in one line with these words, before it starts anything."""
    monkeypatch.setattr("runtime.serve._serve", None)

    def check(placement, words, **options):
        defaults = {"model_path": model_folder, "host": "127.0.0.1", "port": 0}
        with pytest.raises(InputError) as caught:
            serve(placement, source="a.json", **(defaults | options))
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)

    return check


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"launcher": "carrier-pigeon"}, ["--launcher", "local"]),
        ({"engine": "steam"}, ["--engine", "torch"]),
        ({"port": 70000}, ["--port", "70000"]),
        ({"model_path": None}, ["a.json", "model.name", "--model-path"]),
    ],
)
def test_wrong_options_are_input_errors(model_folder, refuses, options, words):
    refuses(make_placement(model_folder), words, **options)


def test_a_model_of_another_vocabulary_is_refused(model_folder, refuses):
    placement = make_placement(model_folder)
    other = placement.model.model_copy(update={"vocab": 32000})
    refuses(placement.model_copy(update={"model": other}), ["config.json", "vocab", "32000"])


def test_another_machine_is_refused(model_folder, refuses):
    placement = make_placement(model_folder)
    cluster = placement.cluster
    node = cluster.nodes[0].model_copy(update={"address": "192.0.2.7"})
    placement = placement.model_copy(update={"cluster": cluster.model_copy(update={"nodes": [node]})})
    refuses(placement, ["a.json", "192.0.2.7", "address"])


def test_replicas_of_vllm_are_not_replanned(files):
    path, model = files
    _, line = refusal(path, "--model-path", model, "--engine", "vllm", "--replan")
    assert "--replan" in line and "--engine vllm cannot be changed" in line and "another --engine" in line
