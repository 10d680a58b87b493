"""The command that starts a module of geomx in a process of its own."""

__all__ = ["module_command"]


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """The command that runs a module of geomx with this Python. Others may be able to write to the working directory,
    and a file there that is called as a module of Python's would take its place.
    """
    return [python, "-P", "-m", module, *arguments]
