"""JSON output of commands: with --json, exactly one object on stdout."""

import json
import math
from typing import Any

import click

__all__ = ["json_option", "print_json"]

json_option = click.option("--json", is_flag=True, help="Print one JSON object instead of text.")


def print_json(value: Any, indent: int | None = None) -> None:
    """Print standard JSON: NaN and infinity, such as a diverged loss, become null."""
    click.echo(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value
