"""Command lines that run modules of geomx."""

__all__ = ["module_command"]


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of geomx with this Python. Others may be able to write to the working
    directory; -P prevents files in it from shadowing modules.
    """
    return [python, "-P", "-m", module, *arguments]
