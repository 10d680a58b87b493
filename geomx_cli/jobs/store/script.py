"""Checks before the start whether the user's script can run, as far as this machine can tell."""

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from msgspec import structs

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import did_you_mean
from geomx_cli.core.options import Value
from geomx_cli.datasets.catalog import is_own
from geomx_cli.inventory import Host, Inventory

__all__ = ["check_script", "check_user_modules", "ignored_interpreter", "python_file", "with_interpreter"]

# Checks before the start whether the modules of a user's own network and data set are there, with their functions.


def check_user_modules(options: Mapping[str, Value], inventory: Inventory) -> None:
    """Raises InvalidSettings if a host that shares this machine's files has no module of --network or --data
    MODULE:FUNCTION, or one in the current folder has no such function. The module is not imported; what another machine
    or Python has is not checked.
    """
    own = {f"--{name}": str(options[name]) for name in ("network", "data") if is_own(str(options[name]))}
    for host in inventory.hosts:
        if host.shares_files and host.python in ("", sys.executable):
            for option, value in own.items():
                _check(option, value, host)


def _check(option: str, value: str, host: Host) -> None:
    module = value.partition(":")[0]
    top, folder = module.partition(".")[0], Path(host.workdir or Path.cwd())
    places = [str(folder), *host.env.get("PYTHONPATH", "").split(":")]
    # sys.meta_path too, which util.find_spec asks: it has the finders of packages installed with pip install -e
    if PathFinder.find_spec(top, places) is None and top not in sys.modules and find_spec(top) is None:
        close = did_you_mean(top, (near.stem for near in folder.glob("*.py")))
        hint = close or f"correct its name, or start from the folder of {top}.py"
        raise InvalidSettings(f"{option} {value}: there is no module {module!r} in {folder}", hint)
    source = folder / f"{module.replace('.', '/')}.py"
    if source.is_file():
        _check_function(option, value, source)


def _check_function(option: str, value: str, source: Path) -> None:
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        raise InvalidSettings(f"{option} {value}: {source} cannot be read: {error}", "correct it") from None
    names = {name for node in ast.walk(tree) for name in _defined(node)}
    function = value.partition(":")[2]
    if function not in names and "*" not in names:
        module = value.partition(":")[0]
        hint = did_you_mean(function, names) or "correct the name"
        raise InvalidSettings(f"{option} {value}: {module} has no function {function!r}", hint)


def _defined(node: ast.AST) -> list[str]:
    """The names that a statement may give to a module; "*" for names that are not known."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return ["*"] if name == "__getattr__" else [name]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
        case ast.Call(func=ast.Name(id="globals" | "setattr" | "exec")):
            return ["*"]
    return []


_INTERPRETERS = ("python", "python3")  # resolved on each host
_LAUNCHERS = {
    "torchrun": "", "torch.distributed.run": "", "torch.distributed.launch": "", "mpirun": "", "mpiexec": "",
    "horovodrun": "", "deepspeed": "", "composer": "", "accelerate-launch": "", "accelerate.commands.launch": "",
    "accelerate": "launch", "lightning": "run", "fabric": "run", "colossalai": "run",
}  # fmt: skip
"""Programs and modules that start the ranks of a script, and the word after them that does, if one is needed."""
_SHELLS = ("bash", "sh", "zsh", "dash")
_BEFORE = ("exec", "then", "do", "else", "nohup", "time", "env", "{", "!")
"""Words before a command."""
_RUNNERS = ("uv", "poetry", "pipenv", "pixi")
_WITH_VALUE = ("-W", "-X")
"""Options of Python with a value, in the same word or in the next."""
_BARE = frozenset(("-u", "-O", "-OO", "-B", "-E", "-I", "-s", "-S", "-v", "-q", "-d", "-i", "-P", "-x", "-b", "-bb"))


def check_script(script: Sequence[str], inventory: Inventory) -> None:
    """Raises InvalidSettings for a missing or unusable program or Python file, on this machine or where hosts get it
    from here. What only another machine can tell is not checked.
    """
    if not script:
        return
    _check_launcher(script)
    for host in inventory.hosts:
        here = host.shares_files
        if here or not host.workdir:
            folder = Path(host.workdir) if host.workdir else Path.cwd()
            if script[0] not in _INTERPRETERS:
                _check_program(script[0], folder, host if here else None)
            named = python_file(script)
            if named and (here or not Path(named).is_absolute()):
                _check_file(named, folder)
                if script[0] in _INTERPRETERS or script[0] == sys.executable:
                    _check_syntax(folder / named)


def _check_launcher(script: Sequence[str]) -> None:
    """Raise InvalidSettings for a command that starts the ranks of a script itself, also in a shell script here."""
    for command in (script, *_commands(_shell_text(script))):
        words = _started(command)
        if words and _LAUNCHERS.get(name := Path(words[0]).name) in ("", *words[1:2]):
            named = next((each for each in command if each.endswith(".py")), "SCRIPT.py")
            shell = next((word for word in script if word.endswith(".sh")), "")
            where = f"write in {shell}:" if shell and command is not script else "write: --"
            hint = f"{where} python {named}; launch sets RANK, WORLD_SIZE and the like in every worker"
            what = f"{name} {_LAUNCHERS[name]}".strip()
            raise InvalidSettings(f"{what} starts workers, and so does geomx launch", hint)


def _started(command: Sequence[str]) -> list[str]:
    """Return the words of a command from the program that it starts in the end, or the module that Python runs."""
    words = list(command)
    while words and (words[0] in _BEFORE or re.match(r"[A-Za-z_]\w*=", words[0])):
        del words[0]
    if words[1:2] == ["run"] and words[0] in _RUNNERS:
        rest = words[2:]  # its options may have values, as `--with torch`
        starts = (at for at, word in enumerate(rest) if Path(word).name in _LAUNCHERS or _runs_python(word))
        return _started(rest[next(starts, len(rest)) :])
    if words and Path(words[0]).name.startswith("python"):
        given = _without_options(words[1:])
        return given[1:] if given[:1] == ["-m"] else words
    return words


def _runs_python(word: str) -> bool:
    return Path(word).name.startswith("python") or word.endswith(".py")


def _without_options(words: Sequence[str]) -> list[str]:
    """Return the words after `python` without its options, up to -m and -c."""
    rest = list(words)
    while rest and (rest[0] in _BARE or rest[0][:2] in _WITH_VALUE):
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    return rest


def _shell_text(script: Sequence[str]) -> str:
    """Return the text of the shell script that a command runs; "" if there is none, or it cannot be read."""
    is_shell = Path(script[0]).name in _SHELLS
    if is_shell and "-c" in script[1:-1]:
        return script[script.index("-c", 1) + 1]
    shell = next((word for word in script if word.endswith(".sh") and (is_shell or word == script[0])), "")
    try:
        return Path(shell).read_text(errors="replace") if shell else ""
    except OSError:
        return ""


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell script."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"[;&|()]", "" if line.lstrip().startswith("#") else line):
            if words := part.split():
                yield words


def with_interpreter(script: Sequence[str], inventory: Inventory) -> Inventory:
    """Return the inventory with the interpreter of the script's command, if that is an absolute path, as `python` of
    other machines that name none: all processes there run in it.
    """
    word = _interpreter(script)
    if not word:
        return inventory
    return inventory.with_hosts(
        host if host.shares_files or host.python else structs.replace(host, python=word)
        for host in inventory.hosts
    )


def _interpreter(script: Sequence[str]) -> str:
    """Return the absolute path of the Python that a command names; "" for others."""
    word = script[0] if script else ""
    return word if word.startswith(("/", "~/")) and PurePosixPath(word).name.startswith("python") else ""


def ignored_interpreter(script: Sequence[str], inventory: Inventory) -> str:
    """Return the warning that hosts run the script with the inventory's `python`, not with that of its command; "" if
    they are the same.
    """
    word = _interpreter(script)
    used = {
        host.python: host.name
        for host in inventory.hosts
        if word and host.python and Path(host.python).expanduser() != Path(word).expanduser()
    }
    if not used:
        return ""
    python, host = next(iter(used.items()))
    return f"the script runs in {python} on {host}, the python of the inventory, not in {word} of the command"


def python_file(script: Sequence[str]) -> str:
    """Return the file that a command passes to Python; "" if it passes none, or if geomx cannot tell."""
    if not Path(script[0]).name.startswith("python"):
        return ""
    words = _without_options(script[1:])
    return words[0] if words and not words[0].startswith("-") else ""


def _check_file(word: str, folder: Path) -> None:
    path = folder / word
    if not path.exists():
        close = did_you_mean(word, (near.name for near in folder.glob("*.py")))
        hint = close or "correct its path, or start from the folder that it is in; geomx init writes an example"
        where = "" if Path(word).is_absolute() else f" in {folder}"
        raise InvalidSettings(f"there is no {word}{where}", hint)
    if not os.access(path, os.R_OK):
        raise InvalidSettings(f"{path} cannot be read", "make it readable")


def _check_syntax(path: Path) -> None:
    """Check that this Python can compile a script, which another one of the same kind is to run."""
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise InvalidSettings(f"{path} cannot be run: {line}{error.msg}", "correct it; nothing was started") from None
    except (OSError, ValueError, RecursionError, MemoryError):
        return  # its own interpreter tells


def _check_program(word: str, folder: Path, host: Host | None) -> None:
    """Check the program `word`. `host`: this machine, or None for another, whose programs are unknown."""
    path = folder / word
    if path.is_file() and ("/" in word or host is None):
        if not os.access(path, os.X_OK):
            raise InvalidSettings(f"{word} is not executable", _instead(word))
    elif host is not None and "/" in word:
        raise InvalidSettings(f"there is no {path}", "correct the path")
    elif host is not None and shutil.which(word, path=host.env.get("PATH")) is None:
        hint = _instead(word) if path.is_file() else "correct its name, or write its path"
        raise InvalidSettings(f"there is no program {word} on the PATH", hint)


def _instead(word: str) -> str:
    """Suggest a command for a file that is not executable."""
    if Path(word).suffix == ".py":
        return f"write: -- python {word}"
    return f"write: -- {word if '/' in word else f'./{word}'}, and make it executable (chmod +x)"
