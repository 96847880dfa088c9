"""The exceptions of the project.

They live in the lowest package, so that every layer can raise them. The command line prints the message and
exits with `exit_code`; callers from Python catch the class."""

from __future__ import annotations

from cost_model.printable import one_line


class HexGen2Error(Exception):
    """Base of all errors that the project raises deliberately."""

    exit_code = 1


class InputError(HexGen2Error):
    """The user's input is wrong: one line naming the file, the key and the remedy.

    Parameters
    ----------
    source : file name or command-line option the input came from
    key : the key that is wrong ("" for the whole source)
    problem : what is wrong
    remedy : what to do about it
    """

    exit_code = 2

    def __init__(self, source: str, key: str, problem: str, remedy: str) -> None:
        self.source, self.key, self.problem, self.remedy = source, key, problem, remedy
        where = f"{source}: {key}" if key else source
        super().__init__(one_line(f"{where}: {problem}; {remedy}"))


class InfeasibleError(HexGen2Error):
    """The input is valid, but no placement satisfies it; the message says why."""

    exit_code = 3
