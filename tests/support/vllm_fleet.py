"""A prefill and a decode replica on CPUs for the vLLM engine, and the processes behind them."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path

import httpx
import psutil
from served import Launched, make_placement
from tokenizer_files import write_model

from hexgen2.placement import Placement, Stage

HEAD_DIM = 32
"""The smallest that vLLM's CPU attention supports."""
START_S = 1200.0
LIMIT_S = 1200.0
CPU_SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,sm,self",
}
ENGINE = "VLLM::EngineCore"
LINES = 60


def write_fleet_model(folder: Path) -> None:
    """Write the tests' Llama with heads of a size that vLLM has kernels for."""
    write_model(folder, head_dim=HEAD_DIM)


def pair(folder: Path) -> Placement:
    """prefill-0 -> decode-0, each on one CPU."""
    placement = make_placement(folder)
    kept = [placement.replica(name) for name in ("prefill-0", "decode-1")]
    one = [Stage(gpus=[f"box/{k}"], layers=(0, placement.model.layers)) for k in range(2)]
    replicas = [
        each.model_copy(update={"id": name, "stages": [stage], "utilisation": 0.25, "max_batch": 4})
        for each, name, stage in zip(kept, ("prefill-0", "decode-0"), one, strict=True)
    ]
    route = placement.routes[0].model_copy(update={"flow_req_s": 1.0})
    return placement.model_copy(
        update={
            "replicas": replicas,
            "routes": [route],
            "throughput": placement.throughput.model_copy(update={"req_s": 1.0, "output_tok_s": 16.0}),
        }
    )


class LaunchedVllm(Launched):
    """`hexgen2 launch --engine vllm`, with access to the processes of its replicas."""

    def __init__(self, placement: Placement, folder: Path, work: Path) -> None:
        how = ["--engine", "vllm", "--dtype", "float32", "--queue-timeout-s", str(START_S)]
        super().__init__(placement, folder, work, *how, **CPU_SETTINGS)
        self.replicas = [replica.id for replica in placement.replicas]

    def descendants(self) -> list[psutil.Process]:
        """Every process that it has started, including vLLM's, which have their own sessions."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        rest = self.descendants() if self.process.poll() is None else []
        for each in alive_among(rest):
            each.kill()
        super().close()

    def guard(self, replica: str) -> psutil.Process:
        """The process that guards a replica's vLLM."""
        side = "kv_producer" if replica.startswith("prefill") else "kv_consumer"
        for each in psutil.Process(self.process.pid).children():
            line = " ".join(each.cmdline())
            if "vllm.guard" in line and side in line:
                return each
        raise AssertionError(f"{replica} is not running")

    def processes(self, replica: str) -> list[psutil.Process]:
        """All of a replica's processes."""
        guard = self.guard(replica)
        return [guard, *guard.children(recursive=True)]

    def server(self, replica: str) -> psutil.Process:
        """Its `vllm serve`."""
        (server,) = self.guard(replica).children()
        return server

    def engine(self, replica: str) -> psutil.Process:
        """The engine's process, which computes."""
        (engine,) = [each for each in self.processes(replica) if " ".join(each.cmdline()).startswith(ENGINE)]
        return engine

    def metrics(self, replica: str) -> str:
        """The metrics of a replica's vLLM."""
        (port,) = re.findall(r"--port (\d+)", " ".join(self.guard(replica).cmdline()))
        return httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=LIMIT_S).text

    def front_metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", trust_env=False, timeout=LIMIT_S).text

    def figures_of(self, text: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in text.splitlines() if re.match(rf"{name}[ {{]", line)]
        return sum(float(line.rpartition(" ")[2]) for line in found if all(each in line for each in wanted))

    def figure(self, replica: str, name: str, **labels: str) -> float:
        return self.figures_of(self.metrics(replica), f"vllm:{name}", **labels)

    def restarts(self, replica: str) -> float:
        """How often a replica has been restarted."""
        return self.figures_of(self.front_metrics(), "hexgen2_replica_restarts_total", replica=replica)

    def until_restarted(self, replica: str, times: float) -> None:
        """Wait until a replica has been restarted this often, and serves."""
        deadline = time.monotonic() + START_S
        while True:
            text = self.front_metrics()
            starts = self.figures_of(text, "hexgen2_replica_restarts_total", replica=replica)
            if starts == times and self.figures_of(text, "hexgen2_replica_up", replica=replica) == 1:
                return
            assert starts <= times and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def story(self) -> str:
        """The server's log, and the end of that of each vLLM."""
        (folder,) = re.findall(r"logs are in (\S+)", self.log.read_text())
        ends = [
            f"{each.name}:\n" + "\n".join(each.read_text(errors="replace").splitlines()[-LINES:])
            for each in sorted(Path(folder).glob("*.log"))
        ]
        return "\n\n".join([self.log.read_text(), *ends])

    def tell_of_restarts(self) -> None:
        """Warn, with the logs, if vLLM was restarted though no test has broken it: requests survive that,
        but whoever reads the test's output should know why."""
        if restarted := [replica for replica in self.replicas if self.restarts(replica)]:
            warnings.warn(f"restarted: {', '.join(restarted)}\n{self.story()}", stacklevel=2)

    def until_idle(self) -> None:
        """Wait until nothing is held: by our accounting, by vLLM's own metrics, and by those that we
        republish. A replica that is being restarted meanwhile is waited for."""
        deadline = time.monotonic() + LIMIT_S
        while left := self._left():
            assert time.monotonic() < deadline, f"{left}\n{self.story()}"
            time.sleep(0.2)

    def _left(self) -> list[str]:
        ours = self.front_metrics()
        names = ("kv_tokens", "requests_running", "engine_kv_use_ratio", "engine_requests_running")
        left = [name for name in names if self.figures_of(ours, f"hexgen2_{name}")]
        for replica in self.replicas:
            try:
                text = self.metrics(replica)
            except httpx.TransportError as error:  # it is being restarted
                left.append(f"{replica} does not answer ({error})")
                continue
            for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
                if value := self.figures_of(text, f"vllm:{name}"):
                    left.append(f"{replica} {name} {value}")
        return left


def alive_among(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that are still running."""
    return [each for each in processes if each.is_running()]
