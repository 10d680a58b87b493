"""`python -m geomx_cli.probe`: serve requests on stdin until it ends."""

import sys

from geomx_cli.probe.service import Service

if __name__ == "__main__":
    sys.exit(Service(sys.stdin.fileno(), sys.stdout.fileno()).run())
