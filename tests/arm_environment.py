"""Make an environment that runs Python, with the project's compiled kernels, as on a processor of ARM.

    python tests/arm_environment.py FOLDER
    QEMU_CPU=neoverse-n1 FOLDER/python -m pytest --noconftest -p tests.conftest tests/runtime/engine/...

qemu emulates the processor, so results are those of ARM, and times say nothing. What already exists in FOLDER
stays, but kernels are built again. Needs Debian's qemu-user-static, g++-aarch64-linux-gnu and debootstrap,
and root's rights for the last one, the first time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE, PYTHON = "bookworm", "3.11"
NEEDED = ("qemu-aarch64-static", "aarch64-linux-gnu-g++", "debootstrap")
TORCH = "torch==2.10.0"
"""Its wheel for ARM needs no libraries of CUDA, as that of 2.13 does."""
PACKAGES = """
accelerate annotated-types anyio attrs certifi charset-normalizer click compressed-tensors filelock fsspec
h11 hf-xet httpcore httpcore2 httpx httpx2 huggingface_hub hypothesis idna iniconfig jinja2 loguru
markupsafe mpmath msgspec networkx numpy packaging pluggy psutil pydantic pydantic_core pygments pytest
pyyaml regex requests safetensors setuptools sniffio sortedcontainers sympy tokenizers tqdm transformers
truststore typing-inspection typing_extensions urllib3
"""
"""What the kernels' tests import, in the versions that this Python has."""
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_28_aarch64")
COMPILER = "aarch64-linux-gnu-g++"
WRAPPER = """#!/bin/sh
export QEMU_LD_PREFIX={folder}/root PYTHONPATH={folder}/packages:{root}
export QEMU_CPU="${{QEMU_CPU:-max,sve=off}}"
exec qemu-aarch64-static {folder}/root/usr/bin/python{python} "$@"
"""


def main(folder: Path) -> None:
    """Make the environment; keep what already exists, but build the kernels."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        sys.exit(
            f"needs {', '.join(missing)}: apt install qemu-user-static g++-aarch64-linux-gnu debootstrap"
        )
    system, packages, python = folder / "root", folder / "packages", folder / "python"
    listed = folder / "packages.txt"
    if not (system / "usr" / "bin" / f"python{PYTHON}").exists():
        shutil.rmtree(system, ignore_errors=True)
        include = "--include=python3,libgomp1,libstdc++6"
        print("retrieving Debian for ARM", flush=True)
        run("debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", include, SUITE, str(system))
        for archive in sorted((system / "var" / "cache" / "apt" / "archives").glob("*.deb")):
            run("dpkg-deb", "--extract", str(archive), str(system))
    names = [TORCH, *(f"{name}=={version(name)}" for name in PACKAGES.split())]
    if not listed.exists() or listed.read_text().split() != names:
        shutil.rmtree(packages, ignore_errors=True)
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
        options += [word for platform in PLATFORMS for word in ("--platform", platform)]
        run(sys.executable, "-m", "pip", "install", *options, "--target", str(packages), *names)
        listed.write_text("\n".join(names) + "\n")
    python.write_text(WRAPPER.format(folder=folder, root=ROOT, python=PYTHON))
    python.chmod(0o755)
    link = f"{COMPILER} -shared"
    compilers = {"CC": COMPILER.replace("g++", "gcc"), "CXX": COMPILER, "LDSHARED": link, "LDCXXSHARED": link}
    old = set((ROOT / "runtime" / "native").glob("*aarch64*.so"))
    for path in old:
        path.unlink()
    run(str(python), "setup.py", "--quiet", "build_ext", "--inplace", **compilers)
    if not list((ROOT / "runtime" / "native").glob("*aarch64*.so")):
        sys.exit("the kernels were not built: see the compiler's messages above")


def run(*words: str, **environment: str) -> None:
    """Run a command in the repository's root, with more in its environment; only errors show."""
    subprocess.run(words, check=True, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
