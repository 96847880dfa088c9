"""The command line: `hexgen2 COMMAND`. Results go to stdout, progress and errors to stderr.

Commands read options, call the functions of `import hexgen2`, and print what these return.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # To look for some takes 40 ms.

import click

from cost_model.errors import HexGen2Error
from hexgen2.terminal import NOTHING_LEFT, echo, fail, leave

COMMANDS = {
    "search": "search:search",
    "launch": "launch:launch",
    "node": "node:node",
    "export": "export:export",
    "simulate": "simulate:simulate",
    "compare": "compare:compare",
    "bench": "bench:bench",
    "estimate": "estimate:estimate",
    "calibrate": "calibrate:calibrate",
    "probe": "probe:probe",
    "show": "show:show",
    "list": "show:list_",
}
"""Each command's module in hexgen2/commands/, and its name there. Only the one that is run is imported, which
takes time."""


class Commands(click.Group):
    """The commands, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them, in alphabetical order."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of this name, if there is one."""
        if name in COMMANDS:
            return imported(name)
        self.commands = {each: imported(each) for each in COMMANDS}  # The error says which is meant.
        return None


def imported(name: str) -> click.Command:
    """A command by its name."""
    module, attribute = COMMANDS[name].split(":")
    found: click.Command = getattr(import_module(f"hexgen2.commands.{module}"), attribute)
    return found


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hexgen2")
def cli() -> None:
    """Place and serve large language models on mixed GPUs, with disaggregated prefill and decode."""


NEW_OBJECTS = 100_000
"""Python looks for cycles after so many new objects. Searches and simulations make millions and hardly any
cycles, and take up to a fifth longer where it looks after 700, the default; so does importing everything."""


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
