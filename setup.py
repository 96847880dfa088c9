"""Compile the engine's CPU kernels if there is a compiler; without them, the engine uses torch and numpy."""

import platform
import sys

from setuptools import Extension, setup

SOURCES = (
    "kernels",
    "products",
    "mxfp4",
    "quantised",
    "integers",
    "rounded",
    "exchange",
    "experts",
    "copies",
    "loading",
    "replay",
)
# Keys are torch's names of CPU capabilities: a build runs on processors with at least these instructions. The
# default build is for any processor of its kind; that for ARM asks at run time for what only some have.
INSTRUCTIONS = {"x86_64": {"avx512": ["-march=x86-64-v4"], "avx2": ["-march=x86-64-v3"]}}


def kernels() -> list[Extension]:
    if sys.platform != "linux":
        return []
    return [
        Extension(
            f"runtime.native._{name}",
            [f"runtime/native/{source}.cpp" for source in SOURCES],
            depends=[
                f"runtime/native/{header}.h" for header in ("vectors", "products", "kv_formats", "replay")
            ],
            extra_compile_args=["-std=c++17", "-O3", "-fno-math-errno", "-Wno-psabi", "-fopenmp", *flags],
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        )
        for name, flags in INSTRUCTIONS.get(platform.machine(), {"default": []}).items()
    ]


setup(ext_modules=kernels())
