"""Manual pages in roff's man macros, from commands and their options."""

import datetime
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping

import click

from geomx_cli import __version__
from geomx_cli.commands._options import option_sections
from geomx_cli.core import errors

__all__ = ["page", "pages", "subcommands"]

_WIDTH = 72  # columns of the source; escapes add some
_EXIT_STATUSES = ((0, "Success."), *(
    (kind.exit_code, inspect.getdoc(kind) or "") for kind in errors.GeomxError.__subclasses__()
))  # fmt: skip


def pages(ctx: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the file name and the text of the page of a command, and of each of its subcommands."""
    yield f"{_dashed(ctx)}.1", page(ctx)
    for below in subcommands(ctx).values():
        yield from pages(below)


def subcommands(ctx: click.Context) -> Mapping[str, click.Context]:
    """Return a context for each subcommand, by name."""
    command = ctx.command
    if isinstance(command, click.Group):
        found = {name: command.get_command(ctx, name) for name in command.list_commands(ctx)}
        return {
            name: click.Context(one, ctx, name) for name, one in found.items() if one is not None and not one.hidden
        }
    own: Mapping[str, click.Command] = getattr(command, "commands", {})  # of geomx logs [JOB]: geomx logs collect
    return {name: click.Context(one, ctx.parent, f"{ctx.info_name} {name}") for name, one in own.items()}


def page(ctx: click.Context) -> str:
    """Return the manual page of a command."""
    command, below = ctx.command, subcommands(ctx)
    usage = " ".join(command.collect_usage_pieces(ctx))
    summary = command.get_short_help_str(200).removesuffix(".")
    title = _dashed(ctx).upper()
    lines = [
        f'.TH "{_text(title)}" 1 "{datetime.datetime.now(datetime.UTC):%Y-%m-%d}" "geomx {__version__}" "geomx manual"',
        ".nh", ".ad l",
        ".SH NAME", f"{_text(_dashed(ctx))} \\- {_text(summary)}",
        ".SH SYNOPSIS", f".B {_text(ctx.command_path)}", _text(usage),
        ".SH DESCRIPTION", *_paragraphs(command.help or ""),
    ]  # fmt: skip
    if below:
        lines += [".SH COMMANDS", *_commands(below.values())]
    for title, records in option_sections(command, ctx).items():
        lines += [f".SH {title.upper()}" if title == "Options" else f".SS {title} options"]
        for term, text in records:
            lines += [".TP", _term(term), _filled(text)]
    lines.append(".SH EXIT STATUS")
    for status, text in _EXIT_STATUSES:
        lines += [".TP", f".B {status}", _text(text)]
    others = [_dashed(one) for one in (*([ctx.parent] if ctx.parent else []), *below.values())]
    if others:
        lines += [".SH SEE ALSO", ",\n".join(f".BR {_text(name)} (1)" for name in others)]
    return "\n".join(lines) + "\n"


def _dashed(ctx: click.Context) -> str:
    return ctx.command_path.replace(" ", "-")


def _commands(contexts: Iterable[click.Context]) -> Iterator[str]:
    for ctx in contexts:
        yield from (".TP", f".BR {_text(_dashed(ctx))} (1)", _filled(ctx.command.get_short_help_str(200)))


def _paragraphs(text: str) -> Iterator[str]:
    """Yield a help text; click's mark "\\b" begins a paragraph whose lines stay as they are."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *map(_text, paragraph.strip("\b\n").split("\n")), ".fi")
        else:
            yield _filled(paragraph)


def _term(text: str) -> str:
    """Return an option as in --help, with flags in bold and the rest in italics."""
    return " ".join(f"\\fB{_text(word)}\\fR" if word[0] == "-" else f"\\fI{_text(word)}\\fR" for word in text.split())


def _text(text: str) -> str:
    """Return `text` so that roff prints it as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return re.sub(r"^(?=[.'])", r"\\&", escaped)


def _filled(text: str) -> str:
    """Return `text` in lines of a length that is usual in a source."""
    lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(_text, lines))
