"""Generates docs/reference/options.md from the table: `python -m geomx_cli.commands.reference`."""

from collections.abc import Iterable, Iterator

from geomx_cli import __version__
from geomx_cli.core.option import KINDS
from geomx_cli.core.options import Option
from geomx_cli.core.plugins import table

__all__ = ["page"]

_HEAD = f"""\
# Options

The options of geomx {__version__}. `python -m geomx_cli.commands.reference` makes this page from the table of options.

Each option is a flag of `geomx launch` and an environment variable.
geomx also uses this variable to pass the option to the processes of a job.
A flag overrides the variable, and the variable overrides the default.

| kind | flag | variable |
|---|---|---|
| duration | `300ms`, `5s`, `2m`, `1.5h` | the same |
| size | `64k`, `1MiB` | the same |
| true or false | `--name` or `--no-name` | 1 or 0 |
"""

_TABLE_HEAD = "| Flag | Variable | Default | Values | Meaning |\n|---|---|---|---|---|\n"


def page(options: Iterable[Option]) -> str:
    """Return the page as Markdown."""
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    return _HEAD + "".join(
        f"\n## {group.capitalize()}\n\n{_TABLE_HEAD}" + "".join(_rows(members))
        for group, members in groups.items()
    )


def _rows(options: Iterable[Option]) -> Iterator[str]:
    for option in options:
        default = f"`{option.default_text}`" if option.default_text else ""
        yield f"| `{option.flag}` | `{option.env}` | {default} | {_values(option)} | {option.help} |\n"


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.offered)
    apart = f"{option.stands_apart}, or" if option.stands_apart else ""
    return " ".join(part for part in (apart, KINDS[option.kind].noun.removeprefix("a "), option.span) if part)


if __name__ == "__main__":
    print(page(table()), end="")
