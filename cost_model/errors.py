"""The one exception tree of the project.

It lives in the lowest package so that every layer can raise it. The command line prints the
message and exits with `exit_code`; a library caller catches the class.
"""

from __future__ import annotations

from cost_model.printable import one_line


class HexGen2Error(Exception):
    """Base of every error that the project raises on purpose."""

    exit_code = 1


class InputError(HexGen2Error):
    """The user's input is wrong: one line naming the file, the key and the remedy.

    Parameters
    ----------
    source : file name or command-line option the input came from
    key : the offending key inside it ("" when the whole source is meant)
    problem : what is wrong
    remedy : what to do about it
    """

    exit_code = 2

    def __init__(self, source: str, key: str, problem: str, remedy: str) -> None:
        self.source, self.key, self.problem, self.remedy = source, key, problem, remedy
        where = f"{source}: {key}" if key else source
        super().__init__(one_line(f"{where}: {problem}; {remedy}"))


class InfeasibleError(HexGen2Error):
    """The input is sound, but no placement satisfies it; the message says why."""

    exit_code = 3
