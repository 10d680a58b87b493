"""Entry point of `geomx` and of `python -m geomx_cli`, for hosts where only the interpreter's path is known."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run `geomx` and return the exit status. Ctrl-C while modules are imported ends it like Ctrl-C in a command."""
    try:
        from geomx_cli import cli

        return cli.main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
