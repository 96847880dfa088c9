"""The command line: `hexgen2 COMMAND`. Results go to stdout, progress and errors to stderr.

Commands read options, call the functions of `import hexgen2`, and print what these return.
"""

from __future__ import annotations

import gc
import sys

import click

from cost_model.errors import HexGen2Error
from hexgen2.commands.bench import bench
from hexgen2.commands.calibrate import calibrate
from hexgen2.commands.compare import compare
from hexgen2.commands.estimate import estimate
from hexgen2.commands.export import export
from hexgen2.commands.launch import launch
from hexgen2.commands.node import node
from hexgen2.commands.probe import probe
from hexgen2.commands.search import search
from hexgen2.commands.show import list_, show
from hexgen2.commands.simulate import simulate
from hexgen2.terminal import NOTHING_LEFT, echo, fail, leave


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hexgen2")
def cli() -> None:
    """Place and serve large language models on mixed GPUs, with disaggregated prefill and decode."""


COMMANDS = (search, launch, node, export, simulate, compare, bench, estimate, calibrate, probe, show, list_)
for command in COMMANDS:
    cli.add_command(command)


NEW_OBJECTS = 10_000
"""Python looks for cycles after so many new objects. Searches and simulations make millions and hardly any
cycles, and take up to a fifth longer where it looks after 700, the default."""


def main() -> None:
    """Entry point."""
    if run() == NOTHING_LEFT:
        leave()


def run() -> object:
    """Run the command that the arguments name, and return what it returns: every expected error is one line
    on stderr and an exit code (2, 3 or 130)."""
    gc.set_threshold(NEW_OBJECTS)
    try:
        return cli.main(standalone_mode=False)
    except HexGen2Error as error:
        fail(str(error))
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "hexgen2"
        fail(f"{error.format_message()} (see `{where} --help`)")
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted before anything was found")
        sys.exit(130)
