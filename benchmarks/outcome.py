"""How a benchmark ends: its results as text or as one object, or its error."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from geomx_cli.core.errors import GeomxError

__all__ = ["conclude"]


def conclude(
    measure: Callable[[], Sequence[Any]], *, as_json: bool, show: Callable[[Sequence[Any]], None] = lambda _: None
) -> int:
    """Measure, and return the exit code. The results are printed as JSON, or by `show` where `measure` did not."""
    try:
        results = measure()
    except GeomxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if as_json:
        print(json.dumps({"schema_version": 1, "results": results}))
    else:
        show(results)
    return 0
