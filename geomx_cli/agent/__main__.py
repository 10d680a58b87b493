"""`python -m geomx_cli.agent DIRECTORY`: supervise one host's part of a job; with `--reap`: end what is left
of it.
"""

import argparse
import sys
from pathlib import Path

from geomx_cli.agent.assignment import Assignment
from geomx_cli.errors import GeomxError


def main(argv: list[str]) -> int:
    """Run the agent, or reap; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m geomx_cli.agent", description=__doc__)
    parser.add_argument("directory", type=Path, help="has agent.json; the agent keeps its state there")
    parser.add_argument("--reap", action="store_true", help="end what a killed agent has left")
    arguments = parser.parse_args(argv)
    try:
        if arguments.reap:
            from geomx_cli.agent.reaper import reap

            left = reap(arguments.directory)
            print(" ".join(str(pid) for pid in left))
            return 1 if left else 0
        from geomx_cli.agent.supervisor import Supervisor

        return Supervisor(arguments.directory, Assignment.read(arguments.directory)).run()
    except (OSError, GeomxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
