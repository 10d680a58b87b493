"""`python -m geomx_cli`: equivalent to `geomx`, for hosts where only the interpreter's path is known."""

import sys

from geomx_cli.cli import main

sys.exit(main())
