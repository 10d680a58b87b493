"""The user's script and what it imports from its own folder, as text and parsed; nothing is executed."""

import ast
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.inventory import Inventory
from geomx_cli.jobs.store.script import python_file

__all__ = ["check_worker_loss", "warning_of", "Source", "sources_of"]

_MOST_FILES, _MOST_BYTES = 200, 1 << 20


@dataclass(frozen=True)
class Source:
    """One file. name: for messages. text: at most 1 MiB of it, "" if it cannot be read."""

    path: Path
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module | None:
        """The parsed file; None if it is of another Python version, or not Python."""
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def sources_of(script: Sequence[str], inventory: Inventory) -> list[Source] | str:
    """Return the script and at most 199 of the files that it imports, the script first; or as a clause why it cannot be
    read here.
    """
    word, module = _python_code(script)
    base = _folder(word, inventory)
    if base is None or not (base / word).is_file():
        return f"{word} cannot be read here" if word else f"{script[0]} is no Python file"
    path = base / word
    return list(_read(path, base if module else path.parent))


def _python_code(script: Sequence[str]) -> tuple[str, bool]:
    """Return the Python file that a command runs ("" if unknown), and whether it is given as a module (-m)."""
    if script[1:2] == ("-m",) and len(script) > 2 and script[0].rpartition("/")[2].startswith("python"):
        return script[2].replace(".", "/") + ".py", True
    return python_file(script) or next((word for word in script if word.endswith(".py")), ""), False


def _folder(word: str, inventory: Inventory) -> Path | None:
    """The job's working directory here, or on a host that copies its files from here; None if neither exists."""
    if not word:
        return None
    for host in inventory.hosts:
        if host.shares_files or not host.workdir:
            return Path(host.workdir or Path.cwd())
    return Path("/") if Path(word).is_absolute() else None


def _read(script: Path, folder: Path) -> Iterator[Source]:
    waiting, seen = [script], {script}
    while waiting:
        path = waiting.pop(0)
        source = Source(path, str(path.relative_to(folder)), _text(path))
        yield source
        for other in _imported(source.tree, path, folder) if source.tree is not None else ():
            if other not in seen and len(seen) < _MOST_FILES:
                seen.add(other)
                waiting.append(other)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _imported(tree: ast.AST, path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` that the module at `path` imports, as far as static analysis tells."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield from _files(folder, item.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            parts = node.module.split(".") if node.module else []
            if base == folder or folder in base.parents:
                yield from _files(base, parts)
                for item in node.names:  # an imported name may be a module
                    yield from _files(base, [*parts, item.name])


def _files(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files executed by importing `parts`: the module and each package's __init__.py."""
    place = base
    for part in parts:
        place = place / part
        for path in (place.with_name(f"{part}.py"), place / "__init__.py"):
            if os.path.isfile(path):  # noqa: PTH113
                yield path
        if not os.path.isdir(place):  # noqa: PTH112  # a name may be longer than Path allows
            return


# Whether the script does the workers' part of the job's algorithm, as far as its text tells.

def warning_of(script: Sequence[str], options: Mapping[str, Value], inventory: Inventory) -> str:
    """Return why a script may not train by the job's algorithm, as a sentence; "" if nothing tells so.

    In hfa, esync and diloco an MXNet script takes the local steps; in PyTorch scripts geomx does. One written for that
    names the algorithm, one of its options or their variables, in its code or its arguments, or asks
    `kv.option("algo")`; comments and docstrings do not count. Of what is no Python file, or cannot be read here,
    nothing is known.
    """
    algorithm = str(options["algo"])
    about = plugins.algorithms()[algorithm]
    if not script or options["framework"] != "mxnet" or about.exchanges == "gradients" or about.standalone:
        return ""
    sources = sources_of(script, inventory)
    if isinstance(sources, str) or _names_it(script, sources, algorithm):
        return ""
    name = sources[0].path.name
    what = f"{name} may not be written for --algo {algorithm}: it names neither {algorithm} nor one of its options"
    return f"{what}; without its local steps it does not train by {algorithm}, whatever reports call it"


def _names_it(script: Sequence[str], sources: Sequence[Source], algorithm: str) -> bool:
    options = plugins.algorithms()[algorithm].options
    texts = frozenset((*(option.env for option in options), *(option.flag for option in options)))
    names = frozenset(("algo", *(option.name for option in options)))
    if any(_has(algorithm, PurePath(word).name) or word.partition("=")[0] in texts for word in script):
        return True
    for source in sources:
        if source.tree is None:
            if _has(algorithm, source.text) or any(text in source.text for text in texts):
                return True
            continue
        if any(word in texts or _has(algorithm, word) for word in _words(source.tree)):
            return True
        if any(_asks(node, names) for node in ast.walk(source.tree)):
            return True
    return False


def _has(algorithm: str, text: str) -> bool:
    """Whether a text has the algorithm's name as a word, also as part of a name in code."""
    return algorithm.lower() in re.findall(r"[^\W_]+", text.lower())


def _words(tree: ast.Module) -> Iterator[str]:
    """Yield names, and texts that are not docstrings."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield text
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                yield name
            case _:
                pass


def _asks(node: ast.AST, names: Container[str]) -> bool:
    """Whether it is a call of `kv.option` with one of these names."""
    match node:
        case ast.Call(func=ast.Attribute(attr="option"), args=[ast.Constant(value=str(name)), *_]):
            return name in names
    return False


# Whether a script can go on without one of its workers, as far as its text tells.

_GROUPS = frozenset(("DistributedDataParallel", "init_process_group"))


def check_worker_loss(script: Sequence[str], options: Mapping[str, Value], inventory: Inventory) -> None:
    """Raise InvalidSettings for --on-worker-loss leave, if the script's own code makes a process group, which needs all
    workers. A process group of a library is refused when the library makes it.
    """
    if not script or options["on_worker_loss"] != "leave":
        return
    sources = sources_of(script, inventory)
    for source in sources if not isinstance(sources, str) else ():
        if source.tree is not None and (found := _GROUPS.intersection(_words(source.tree))):
            what = f"--on-worker-loss leave: {source.name} has {min(found)}, and a process group needs all workers"
            raise InvalidSettings(what, "use --on-worker-loss restart-all, or leave it out: then the job ends")
