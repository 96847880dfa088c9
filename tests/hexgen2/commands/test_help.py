"""Help of every command has grouped options and examples that parse; `--quiet`; `python -m hexgen2`."""

from __future__ import annotations

import shlex
import subprocess
import sys

import click
import pytest
from commands import hexgen2 as run

from hexgen2.cli import COMMANDS, imported
from hexgen2.commands.options import GroupedOption

BY_NAME = {name: imported(name) for name in COMMANDS}


@pytest.mark.parametrize("name", BY_NAME)
def test_help_has_groups_and_examples(name):
    command = BY_NAME[name]
    shown = run(name, "--help")
    assert shown.returncode == 0 and not shown.stderr
    for param in command.params:
        if isinstance(param, click.Option):
            assert isinstance(param, GroupedOption), f"{param.name} has no group"
            assert param.help, f"{param.name} says nothing"
            assert f"\n{param.group}:\n" in shown.stdout and f"{param.opts[-1]}" in shown.stdout
    assert "--quiet" in shown.stdout and len(command.examples) >= 2


@pytest.mark.parametrize("name", BY_NAME)
def test_examples_are_read_without_an_error(name):
    for example in BY_NAME[name].examples:
        program, named, *words = shlex.split(example.replace("\\\n", "").partition(" | ")[0])
        assert (program, named) == ("hexgen2", name)
        BY_NAME[name].make_context(name, words)


def test_quiet_prints_no_progress(tmp_path):
    asked = ("--cluster", "hexgen2-case-study", "--model", "llama-2-13b", "--workload", "LPLD")
    asked += ("--phases", "disaggregated")
    loud, quiet = (run("search", *asked, *more) for more in ((), ("--quiet",)))
    assert "best" in loud.stderr and quiet.stderr == "" and quiet.stdout == loud.stdout
    assert run("search", *asked, "--quiet", "--seed", "-1").stderr.startswith("hexgen2: ")


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "hexgen2", "list", "models"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "llama-2-70b" in done.stdout
