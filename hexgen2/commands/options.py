"""What commands share: help with groups of options and examples, and options that several of them have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cost_model.dtypes import KV_BYTES, WEIGHT_BYTES
from cost_model.errors import InputError
from cost_model.registry import COST_MODELS
from hexgen2.goal import LARGEST, SMALLEST
from hexgen2.terminal import QUIET

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Function = TypeVar("Function", bound=Callable[..., Any])
Settings = TypeVar("Settings", bound="DataclassInstance")

PATH = click.Path(path_type=Path)


class Number(click.FloatRange):
    """A number in a range, which may have no end; nan is none."""

    def convert(self, value, param, ctx) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


POSITIVE = Number(SMALLEST, LARGEST)
"""A rate, a target, a time or a price: a number above zero that is safe to compute with."""

SEED = click.IntRange(0, 2**63 - 1)


class GroupedOption(click.Option):
    """An option that is listed under its group's title."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Defaults and ranges, without the ranges that only keep numbers finite."""
        extra = super().get_help_extra(ctx)
        if self.type in (POSITIVE, SEED):
            extra.pop("range", None)
        return extra


def options(group: str) -> Callable[..., Callable[[Function], Function]]:
    """`click.option` for the options of a group."""
    return partial(click.option, cls=GroupedOption, group=group)


class Command(click.Command):
    """A command whose help lists its options by group, then two or more examples; it has --quiet.

    Groups are listed in the order of their first option.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.params.append(
            GroupedOption(
                ["-q", "--quiet"],
                is_flag=True,
                expose_value=False,
                callback=_be_quiet,
                group="Output",
                help="Print no progress on stderr.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section for each group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "group", "Output"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, each on lines of its own that can be copied."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def _be_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[QUIET] = value


_output = options("Output")


def output_option(what: str) -> Callable[[Function], Function]:
    """-o FILE, where a command writes its result."""
    return _output("-o", "--output", type=PATH, metavar="FILE", help=f"Write the {what} to FILE.")


def json_option(what: str) -> Callable[[Function], Function]:
    """--json, which prints the result for programs."""
    return _output("--json", "as_json", is_flag=True, help=f"Print the {what} as one JSON object.")


def format_options(function: Function) -> Function:
    """--weights and --kv: number formats instead of the model's own."""
    detail, own = options("Number formats"), "[default: the model's own]"
    weights = detail("--weights", type=click.Choice(list(WEIGHT_BYTES)), help=f"Format of weights.  {own}")
    return weights(
        detail("--kv", type=click.Choice(list(KV_BYTES)), help=f"Format of KV caches.  {own}")(function)
    )


def cost_model_option(group: str, default: str) -> Callable[[Function], Function]:
    """--cost-model; `default` says what it is if not given."""
    return options(group)(
        "--cost-model",
        metavar="NAME|FILE",
        help=f"How times are predicted: {', '.join(COST_MODELS)}, or a file written by `hexgen2 calibrate` "
        f"(of several engines FILE:ENGINE, or vllm).  [default: {default}]",
    )


def arrival_options(usual: int | str, most: int) -> Callable[[Function], Function]:
    """Options for the lengths and arrival times of requests, how many are in flight, and how many there are
    (`usual`, in words or as a number, if not given)."""
    load = options("Load")
    listed = (
        load("--isl", type=float, metavar="TOKENS", help="Mean prompt length, instead of --workload."),
        load("--osl", type=float, metavar="TOKENS", help="Mean output length, instead of --workload."),
        load(
            "--length-range",
            type=float,
            default=1.0,
            metavar="SHARE",
            help="Draw lengths uniformly, from SHARE times the prompt and output lengths given up to these; "
            "0.8: from 80 to 100 %.",
        ),
        load(
            "--max-concurrency",
            type=click.IntRange(min=1),
            metavar="N",
            help="Most requests in flight; without times of arrival, N clients that each send the next "
            "request when their last one has ended.",
        ),
        load(
            "--num-requests",
            "--num-prompts",
            "num_requests",
            type=click.IntRange(1, most),
            metavar="N",
            help=f"Number of requests.  [default: {usual}]",
        ),
        load("--duration-s", type=POSITIVE, metavar="S", help="Only requests that arrive within S seconds."),
        load(
            "--burstiness",
            type=POSITIVE,
            default=1.0,
            show_default=True,
            metavar="SHAPE",
            help="Burstiness of arrivals: 1 is Poisson, less is burstier.",
        ),
        load(
            "--seed",
            type=SEED,
            default=0,
            show_default=True,
            metavar="N",
            help="Seed for lengths and arrivals.",
        ),
    )

    def apply(function: Function) -> Function:
        for option in reversed(listed):
            function = option(function)
        return function

    return apply


def setting(
    group: str, defaults: DataclassInstance, flag: str, kind: click.ParamType, help: str, **more: Any
) -> Callable[[Function], Function]:
    """An option for a field of some settings: it has the field's name and default."""
    default = getattr(defaults, flag.removeprefix("--").replace("-", "_"))
    return options(group)(flag, type=kind, default=default, show_default=True, help=help, **more)


def settings_of(kind: type[Settings], values: Mapping[str, Any], **others: Any) -> Settings:
    """Settings from the values of the options named like their fields, and from others."""
    named = {field.name: values[field.name] for field in fields(kind) if field.name in values}
    return kind(**named, **others)


def check_folder(path: Path | None) -> None:
    """Complain early about an output file (None: none) whose folder is missing.

    Raises
    ------
    InputError
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(str(path), "", "its folder does not exist", "create it first")
