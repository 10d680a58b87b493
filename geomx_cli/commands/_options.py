"""Command-line options from the table of options: flag first, then environment variable, then default."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from geomx_cli.core import deliveries, plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import KINDS
from geomx_cli.core.options import Option, Value, codec_name, decode

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["GroupedCommand", "add_options", "doubtful", "of_other_deliveries", "option_sections", "unused", "values"]


class _Type(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """An option's value as text. Invalid values raise InvalidSettings, whether from a flag or a variable."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.name = option.kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Value:
        return decode(self.option, value) if isinstance(value, str) else value

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        if self.option.choices:
            return "|".join(self.option.offered)
        return KINDS[self.option.kind].metavar

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> "list[CompletionItem[str]]":
        """Return the matching values; a text without any may be a path."""
        from click.shell_completion import CompletionItem

        known = self.option.offered or self.option.suggestions
        if self.option.takes_codec:
            known = tuple(plugins.codecs())  # found here, as importing them takes time
        if self.option.kind == "text" and not known:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(value) for value in known if value.startswith(incomplete)]


class _Bool(click.types.BoolParamType):
    """Like `_Type`, for a bool, which click must recognize as one."""

    def __init__(self, option: Option) -> None:
        self.option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        return bool(decode(self.option, value)) if isinstance(value, str) else bool(value)


class TableOption(click.Option):
    """A click option made from a table entry. A bool is written `--name` or `--no-name`."""

    def __init__(self, option: Option) -> None:
        self.option = option
        is_bool = option.kind == "bool"
        both = f"{option.flag}/--no-{option.flag.removeprefix('--')}"
        super().__init__(
            [option.name, both if is_bool else option.flag],
            type=_Bool(option) if is_bool else _Type(option),
            is_flag=is_bool or None,
            default=option.default,
            envvar=option.env,
            show_envvar=True,
            show_default=bool(option.default_text),
            help=option.help,
        )

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return the bracketed text after the help, with the default as a user writes it."""
        extra = super().get_help_extra(ctx)
        if "default" in extra:
            extra["default"] = self.option.default_text
        return extra


class GroupedCommand(click.Command):
    """A command whose help lists its own options, then those of the table under their groups' headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the option sections."""
        for title, records in option_sections(self, ctx).items():
            with formatter.section(title):
                formatter.write_dl(records)


def option_sections(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return a command's options as (flags, help), by heading: the group of an option of the table, else "Options". The
    last heading has how values with units are written.
    """
    sections: dict[str, list[tuple[str, str]]] = {"Options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record and isinstance(parameter, click.Option):
            heading = parameter.option.group.capitalize() if isinstance(parameter, TableOption) else "Options"
            sections.setdefault(heading, []).append(record)
    kinds = {option.option.kind for option in command.params if isinstance(option, TableOption)}
    if units := [(KINDS[kind].metavar, KINDS[kind].how) for kind in KINDS if kind in kinds and KINDS[kind].how]:
        sections["Values"] = units
    return sections


def add_options(table: Iterable[Option]) -> Callable[[click.Command], click.Command]:
    """Decorator that adds each option of `table` to a command."""

    def decorate(command: click.Command) -> click.Command:
        command.params += [TableOption(option) for option in table]
        return command

    return decorate


def values(table: Iterable[Option], parameters: Mapping[str, Any]) -> dict[str, Value]:
    """Return the values of the table's options among a command's `parameters`."""
    return {option.name: parameters[option.name] for option in table}


def unused(
    ctx: click.Context, table: Iterable[Option], algorithm: str, *, script: bool, topology: str = ""
) -> Iterator[str]:
    """Yield a sentence for each option that has no effect on the job: those on the command line, and what the
    inventory's `topology`, by default that on the command line, leaves without one.
    """
    topology = topology or str(ctx.params.get("topology"))
    written = [item for item in table if ctx.get_parameter_source(item.name) is ParameterSource.COMMANDLINE]
    for option in written:
        having = plugins.users(option.name)
        if not plugins.affects(option.name, algorithm):
            yield f"{option.flag} is for --algo {' or '.join(having)}, and this job runs {algorithm}"
    by_gradients = [name for name, each in plugins.algorithms().items() if each.sums_gradients]
    if any(option.name == "p3" for option in written) and ctx.params["p3"] and algorithm not in by_gradients:
        fits = " and ".join(by_gradients)
        yield f"--p3 with --algo {algorithm} makes slices shorter and nothing else: it is for {fits}"
    if plugins.algorithms()[algorithm].needs_local_server and topology == "flat":
        yield f"--topology flat: all workers are one party in {algorithm}, so each mean is global; --k2 has no effect"
    of_bundled = (option.flag for option in written if option.group == "training" and option.name != "framework")
    training = ", ".join(of_bundled)
    if script and training:
        own = "write a script's own options behind its name (MXNet scripts may read these with kv.option)"
        yield f"{training}: no effect on a script, only on the bundled job; {own}"


def of_other_deliveries(ctx: click.Context, values: Mapping[str, Value]) -> Iterator[str]:
    """Yield a sentence for each option on the command line of a delivery that the job does not have, or that has an
    effect only with another value of the option that chooses the delivery (`only_with` of its module).
    """
    present = deliveries.chain(values)
    for name, delivery in plugins.deliveries().items():
        chooses, only_with = str(getattr(delivery, "chosen_by", "delivery")), getattr(delivery, "only_with", {})
        for option in delivery.options:
            if option.name == chooses or ctx.get_parameter_source(option.name) is not ParameterSource.COMMANDLINE:
                continue
            if name not in present:
                chosen = f"--delivery {name}" if chooses == "delivery" else f"--{chooses}"
                yield f"{option.flag} has no effect without {chosen}"
            elif only_with.get(option.name, values[chooses]) != values[chooses]:
                yield f"{option.flag} has no effect without --{chooses} {only_with[option.name]}"


def doubtful(values: Mapping[str, Value], *, script: bool) -> Iterator[str]:
    """Yield a sentence for options that work together, but are better chosen otherwise."""
    spec, algorithm = str(values["compress"]), str(values["algo"])
    if not spec or script or values["optimizer_on"] == "worker" or not plugins.algorithms()[algorithm].sums_gradients:
        return
    from geomx_cli.contract.codecs import parse

    codec = None
    with suppress(InvalidSettings):  # the plan refuses it, and names the option
        codec = parse(spec)
    if codec is not None and codec.for_local_optimizers:
        how = "trains better with --optimizer-on worker: see docs/how-to/choose-codec.md"
        yield f"--compress {codec_name(spec)} with --algo {algorithm} {how}"
