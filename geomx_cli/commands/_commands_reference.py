"""The reference of all commands in Markdown, docs/reference/commands.md: `geomx man --markdown`."""

import inspect
from collections.abc import Iterable, Iterator

import click

from geomx_cli.commands._manual import subcommands
from geomx_cli.commands._options import option_sections

__all__ = ["page"]

_HEAD = """\
# Commands

`geomx man --markdown` makes this page from the texts of the commands.

[Options](options.md) lists the options of a job, which `geomx launch` and other commands share.
`geomx COMMAND --help` (`-h`) and `geomx man COMMAND` show the texts of this page. All commands have the same
[exit codes](exit-codes.md).
"""


def page(ctx: click.Context) -> str:
    """Return the page of the command of `ctx` and all below it."""
    return _HEAD + "".join("\n" + line for line in _sections(ctx))


def _sections(ctx: click.Context) -> Iterator[str]:
    below = subcommands(ctx).values()
    usage = " ".join((ctx.command_path, *ctx.command.collect_usage_pieces(ctx)))
    yield f"## {ctx.command_path}\n"
    yield f"```\n{usage}\n```\n"
    yield from _paragraphs(ctx.command.help or "")
    sections = option_sections(ctx.command, ctx)
    # Every command has --help; click keeps under which names it was first shown.
    own = [(term, text) for term, text in sections.pop("Options") if not term.endswith("--help")]
    if own:
        yield "| option | meaning |\n|---|---|\n" + _rows(own)
    if sections:
        yield "It also takes the options of the job: [options](options.md).\n"
    for one in below:
        yield from _sections(one)


def _rows(records: Iterable[tuple[str, str]]) -> str:
    return "".join(f"| `{term}` | {_escaped(text)} |\n" for term, text in records)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield a help text; click's mark "\\b" begins a paragraph whose lines stay as they are."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            text = paragraph.strip("\b\n")
            title, _, indented = text.partition("\n")
            if indented and all(line.startswith(" ") for line in indented.split("\n")):
                yield f"{title}\n"
                text = inspect.cleandoc(indented)
            yield f"```\n{text}\n```\n"
        else:
            yield _escaped(" ".join(paragraph.split())) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
