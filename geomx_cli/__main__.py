"""`python -m geomx_cli`: the same as `geomx`, for a machine on which only the interpreter's path is known."""

import sys

from geomx_cli.cli import main

sys.exit(main())
