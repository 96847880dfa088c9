"""The emulated engine gives the right tokens, no sooner than the real model would, under any faults."""

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from served import alive, gauge, make_mixed_placement, make_placement, until_idle

from cluster_specs.loader import resolve
from cost_model.base import Work
from cost_model.errors import InputError
from cost_model.lengths import Window
from cost_model.registry import make_cost_model
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.prediction.step_times import StepTimes
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from runtime.api.numbers import NumberTokenizer
from runtime.engine.emulated.engine import work_of
from runtime.engine.emulated.tokens import answer
from runtime.launcher.configure import configurations
from runtime.options import EngineOptions
from runtime.protocol.between_workers import SequenceStep, Step

COMMAND = Path(sys.executable).with_name("hexgen2")
LIMIT_S = 240.0
PROMPTS = [list(range(16 + 10 * k, 216 - 20 * k)) for k in range(6)]


def expected(prompt, count, vocabulary, seed=0):
    """The engine's formula, written independently."""
    state, found = 0, []
    for token in prompt:
        state = (state * 0x1D3F2A6C9B5E4781 + token + 1) % (2**61 - 1)
    for _ in range(count):
        digest = hashlib.blake2b(state.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=8)
        found.append(int.from_bytes(digest.digest(), "little") % vocabulary)
        state = (state * 0x1D3F2A6C9B5E4781 + found[-1] + 1) % (2**61 - 1)
    return found


class Fleet:
    """`hexgen2 launch --engine emulated` in a session of its own."""

    def __init__(self, placement: Placement, work: Path) -> None:
        self.placement, self.log = placement, work / "launch.log"
        placement.save(work / "placement.json")
        command = [COMMAND, "launch", work / "placement.json", "--engine", "emulated", "--port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "--restarts", "9"], stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + LIMIT_S
        while " on http" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        url = self.log.read_text().partition(" on ")[2].split()[0]
        self.http = httpx.Client(base_url=url, timeout=LIMIT_S)

    def ask(self, prompt, count, **more):
        body = {"model": self.placement.model.name, "prompt": prompt, "max_tokens": count, "temperature": 0}
        answered = self.http.post("/v1/completions", json=body | more)
        assert answered.status_code == 200, answered.text
        return answered.json()

    def workers(self) -> dict[str, psutil.Process]:
        """The workers by the GPU that each shows as its process name."""
        gpus = {gpu for replica in self.placement.replicas for gpu in replica.gpus}
        named = {(Path(f"/proc/{each.pid}/comm").read_text().strip()): each for each in self.family()}
        return {name: each for name, each in named.items() if name in gpus}

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(LIMIT_S)
        self.http.close()


@pytest.fixture(scope="module")
def setting():
    problem = make_problem("hexgen2-setting-1", "llama-2-70b", "HPHD")
    return find_strategy("hexgen2")(problem, SearchOptions())


@pytest.fixture(scope="module")
def fleet(setting, tmp_path_factory):
    fleet = Fleet(setting, tmp_path_factory.mktemp("emulated"))
    yield fleet
    fleet.close()


def tokens(text):
    return [int(name.removeprefix("t")) for name in text.split()]


def test_anybody_can_say_what_follows_a_prompt():
    for prompt, seed in itertools.product(PROMPTS, (0, 1, 2**63 - 1)):
        assert answer(prompt, 40, 32000, seed) == expected(prompt, 40, 32000, seed)


def test_a_placement_of_twenty_gpus_serves_on_this_machine(fleet):
    """Each GPU is a process without torch; answers are right, and all of their KV caches have moved."""
    workers = fleet.workers()
    assert len(workers) == 20
    assert not any("libtorch" in Path(f"/proc/{each.pid}/maps").read_text() for each in workers.values())
    model = fleet.placement.model
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: fleet.ask(prompt, 12), PROMPTS))
    for prompt, found in zip(PROMPTS, answers, strict=True):
        assert tokens(found["choices"][0]["text"]) == expected(prompt, 12, model.vocab)
        assert found["usage"] == found["usage"] | {"prompt_tokens": len(prompt), "completion_tokens": 12}
    fresh = fleet.ask(list(range(5000, 5100)), 2)
    assert fresh["hexgen2"]["kv_bytes"] == 100 * model.kv_bytes_per_token
    until_idle(fleet.http)


def test_a_seed_counts_unless_the_temperature_is_zero(fleet):
    vocabulary = fleet.placement.model.vocab
    for temperature, seed in ((0, 7), (1, 7), (1, 8)):
        found = fleet.ask(PROMPTS[0], 5, temperature=temperature, seed=seed)["choices"][0]["text"]
        assert tokens(found) == expected(PROMPTS[0], 5, vocabulary, seed if temperature else 0)


def test_an_answer_takes_no_less_than_the_cost_model_says(fleet):
    placement = fleet.placement
    begun = time.monotonic()
    found = fleet.ask(list(range(7000, 7300)), 6)["hexgen2"]
    taken_s = time.monotonic() - begun
    costs = make_cost_model(placement.cost_model.name, placement.model, placement.workload.lengths)
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    prefill, decode = (
        StepTimes(placement.replica(found[f"{role}_replica"]), cluster, costs, "pipelined")
        for role in ("prefill", "decode")
    )
    prompt = prefill.step(Work(300, sum(range(1, 301)), 0, 0, 1))
    steps = [decode.step(Work(0, 0, 1, 300 + k, 1)) for k in range(1, 6)]
    assert taken_s >= sum(sum(stage_s) + sum(hop_s) for stage_s, hop_s in (prompt, *steps))


def test_a_rank_is_killed_and_no_stream_notices(fleet):
    """Kills the last rank of a replica with several stages; any rank would do."""
    vocabulary, count = fleet.placement.model.vocab, 40
    busy = next(each for each in fleet.placement.replicas if each.role == "decode" and len(each.stages) > 1)
    prompts = [[k, *PROMPTS[0]] for k in range(1, 7)]
    body = {"model": fleet.placement.model.name, "prompt": prompts, "max_tokens": count, "temperature": 0}
    texts, struck = dict.fromkeys(range(len(prompts)), ""), False
    with fleet.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
                if not struck and all(texts.values()):
                    fleet.workers()[busy.gpus[-1]].kill()
                    struck = True
    assert [tokens(text) for text in texts.values()] == [
        expected(each, count, vocabulary) for each in prompts
    ]
    assert gauge(fleet.http, "hexgen2_requests_resumed_total") > 0
    deadline = time.monotonic() + LIMIT_S
    while fleet.http.get("/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    until_idle(fleet.http)


def test_a_killed_front_end_leaves_no_worker_not_even_one_that_is_stopped(fleet):
    """This must be the last test with this fleet."""
    family, workers = fleet.family(), list(fleet.workers().values())
    workers[5].send_signal(signal.SIGSTOP)
    os.kill(fleet.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while left := alive(family):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_mixed_replicas_answer_right_before_and_after_one_of_them_is_killed(model_folder, tmp_path):
    placement = make_mixed_placement(model_folder)
    vocabulary = placement.model.vocab
    prompts = [[k, *range(20, 60)] for k in range(16)]
    fleet = Fleet(placement, tmp_path)
    try:
        for count, killed in ((6, ""), (60, "box/1"), (6, "")):
            body = {"model": placement.model.name, "prompt": prompts, "max_tokens": count, "temperature": 0}
            texts = dict.fromkeys(range(len(prompts)), "")
            with fleet.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        texts[choice["index"]] += choice["text"]
                        if killed and any(texts.values()):
                            fleet.workers()[killed].kill()
                            killed = ""
            answers = [tokens(text) for text in texts.values()]
            assert answers == [expected(prompt, count, vocabulary) for prompt in prompts]
        assert gauge(fleet.http, "hexgen2_requests_resumed_total") > 0
        assert gauge(fleet.http, "hexgen2_route_kv_bytes_total") > 0
        until_idle(fleet.http)
    finally:
        fleet.close()


def test_work_is_counted_as_the_cost_model_does():
    """Tokens [4, 7) of a prompt, of which the last one samples, and two decodes at contexts 9 and 21. A
    prompt token attends to all tokens before it and counts half for itself."""
    step = Step(
        step=0,
        starts=(),
        sequences=(
            SequenceStep(request_id="a", tokens=(1, 2, 3), position=4, index=0, samples=True),
            SequenceStep(request_id="b", tokens=(1,), position=8, index=3, samples=True),
            SequenceStep(request_id="c", tokens=(1,), position=20, index=1, samples=True),
        ),
    )
    assert work_of(step, None) == Work(3, 4.5 + 5.5 + 6.5, 2, 9 + 21, 3)
    assert work_of(step, Window(6)) == Work(3, 4.5 + 5.5 + 6, 2, 6 + 6, 3)


def test_numbers_are_text_and_text_is_numbers():
    tokenizer = NumberTokenizer(32000)
    assert tokenizer.decode([5, 31999]) == "t5 t31999 "
    assert tokenizer.encode("t5 t31999 ") == [5, 31999]
    assert tokenizer.encode("a t5 b") == [97, 32, 5, 98]


def test_links_are_emulated_and_other_transports_refused(model_folder):
    placement = make_placement(model_folder)
    told = configurations(placement, Path(), "bfloat16", engine="emulated")
    assert sum(bool(each.kv_links) for each in told.values()) == 3
    assert Placement.model_validate_json(told["box/0"].emulation.placement) == placement
    with pytest.raises(InputError, match="is not for the emulated engine"):
        configurations(placement, Path(), "bfloat16", EngineOptions(kv_transport="shm"), engine="emulated")
