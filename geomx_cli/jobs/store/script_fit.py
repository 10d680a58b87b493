"""Whether the user's script does the workers' part of the job's algorithm, as far as its text tells."""

import ast
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import PurePath

from geomx_cli.core import plugins
from geomx_cli.core.options import Value
from geomx_cli.inventory import Inventory
from geomx_cli.jobs.store.script_sources import Source, sources_of

__all__ = ["warning_of"]


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
