"""Reads hosts.toml, the inventory file. Reports all errors at once, with line numbers."""

import codecs
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import KINDS, nearest
from geomx_cli.core.options import Option, Value, check, decode
from geomx_cli.inventory import Inventory
from geomx_cli.inventory.checks import Check, build, cross_check
from geomx_cli.inventory.keys import HOST_KEYS, LINK_KEYS, SSH_KEYS, TOP_KEYS, Key, Lines, Mistakes, shortened
from geomx_cli.inventory.values import kind_of

__all__ = ["InventoryFile", "of_tables", "read", "read_text"]

_TABLES = ("host", "link", "defaults", "job", "ssh")
_LARGEST = 4 << 20  # bytes: maximum size of an inventory
_DIGITS = re.compile(r"[0-9_]{4300}")  # a number with more digits than Python parses


@dataclass(frozen=True)
class InventoryFile:
    """The content of an inventory file. `job` has the options of its table [job] by name; `notes` are sentences about
    defaults chosen by geomx.
    """

    path: Path
    inventory: Inventory
    job: Mapping[str, Value]
    notes: tuple[str, ...]


def read(path: Path, check: Check) -> InventoryFile:
    """Read the inventory at `path`. Accesses nothing but the file and, to check their existence, private keys.

    `check` returns the errors of an otherwise valid inventory, i.e. whether a job can be planned on it. Raises
    InvalidSettings that lists every error with its line and a hint.
    """
    text = read_text(path)
    try:
        return of_tables(path, _parsed(path.name, text), Mistakes(path.name, Lines.of(text)), check)
    except RecursionError:
        raise InvalidSettings(f"{path.name} is nested too deeply", _EXAMPLE) from None


def of_tables(path: Path, data: Mapping[str, Any], mistakes: Mistakes, check: Check) -> InventoryFile:
    """The inventory of a file that has been parsed; `mistakes` knows its lines. Raises as `read`."""
    top = _entries(data, TOP_KEYS, (), mistakes, beside=_TABLES)
    ssh = _entries(_table(data, "ssh", mistakes), SSH_KEYS, ("ssh",), mistakes)
    hosts = [{**host, **ssh} for host in _hosts(data, path.parent, mistakes)]
    job = _job(data, mistakes)
    links = [_entries(entry, LINK_KEYS, ("link", index), mistakes) for index, entry in _tables(data, "link", mistakes)]
    cross_check(top, hosts, links, mistakes)
    mistakes.raise_if_any()
    inventory, notes = build(top, hosts, links, mistakes, check)
    return InventoryFile(path, inventory, job, notes)


def read_text(path: Path) -> str:
    """Read a file that lists machines. Raises InvalidSettings for one that cannot be read, and one of over 4 MiB."""
    try:
        if not path.is_dir() and path.exists() and not path.is_file():  # a device, or a pipe that may block forever
            raise InvalidSettings(f"{path} is no plain file", "write the inventory into one")
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise InvalidSettings(f"{path} has more than {_LARGEST >> 20} MiB: it is no inventory", "name another file")
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as Windows may save it
        return data.decode("utf-16" if wide else "utf-8-sig")
    except FileNotFoundError:
        raise InvalidSettings(
            f"there is no inventory {path}", "geomx init writes one to begin with, or name another with --hosts"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InvalidSettings(f"{path.name}:{line}: this is not UTF-8", "save the file as UTF-8") from None
    except OSError as error:
        raise InvalidSettings(f"cannot read {path}: {error.strerror}", "name another file, or let it be read") from None


_EXAMPLE = "see docs/reference/inventory.md for an example"
_SYNTAX = (
    ("Invalid value", 'text stands in quotes, as name = "beijing-1"; a list in brackets, as ["gpu0", "gpu1"]'),
    ("Cannot declare ('host',)", "every host begins with [[host]], in two brackets"),
    ("Cannot declare", "this table was there before; put all its keys under the first one"),
    ("Cannot overwrite", "this key was there before in the same table; keep one of the two"),
    ("Expected '='", 'a line is a key and a value, as name = "beijing-1", or the name of a table in brackets'),
    ("Unclosed array", "close the list with ]"),
    ("Expected newline", "one key stands on a line; text with quotes in it stands in single quotes"),
    ("Illegal character", "close the quotes on the same line"),
)


def _parsed(name: str, text: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(text)
        _refuse_long(data)
        return data
    except tomllib.TOMLDecodeError as error:
        what, _, place = str(error).rpartition(" (at ")
        found = re.match(r"line ([0-9]+)", place)
        line = int(found[1]) if found else max(1, len(text.rstrip().splitlines()))
        hint = next((hint for start, hint in _SYNTAX if what.startswith(start)), _EXAMPLE)
        raise InvalidSettings(f"{name}:{line}: invalid TOML: {shortened(what)}", hint) from None
    except ValueError:
        number = _DIGITS.search(text)
        place = f"{name}:{text.count(chr(10), 0, number.start()) + 1}" if number else name
        raise InvalidSettings(f"{place}: a number has too many digits", "write one of at most 64 bits") from None


def _refuse_long(data: Any) -> None:
    """Raise ValueError for an integer of more than 64 bits, which TOML does not allow and Python may be unable to
    print.
    """
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and value.bit_length() > 64:
            raise ValueError


def _entries(
    table: Mapping[str, Any],
    keys: Sequence[Key],
    where: tuple[str | int, ...],
    mistakes: Mistakes,
    beside: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the valid values of a table's known keys."""
    known: dict[str, Key] = {key.name: key for key in keys}
    found: dict[str, Any] = {}
    for name, value in table.items():
        if name in beside:
            continue
        if name not in known:
            mistakes.add((*where, name), f"there is no key {name!r} here", _elsewhere(name, where, known))
            continue
        for path, part in _parts(value):
            try:
                parsed = known[name].parse(part, known[name].example)
                found[name] = {**found.get(name, {}), **parsed} if path else parsed
            except InvalidSettings as error:
                mistakes.add((*where, name, *path), f"{name}: {error.message}", error.hint)
    return found


def _parts(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a value as a whole, or each entry of a table, which has its own line."""
    if isinstance(value, dict) and value:
        yield from (((name,), {name: entry}) for name, entry in value.items())
    else:
        yield (), value


def _elsewhere(name: str, where: tuple[str | int, ...], known: Mapping[str, Key]) -> str:
    """Return where an unknown key belongs, or the nearest known keys."""
    if name in {key.name for key in TOP_KEYS} and where:
        return "it stands at the top of the file, before the first table"
    if name in {option.name for option in plugins.table()} and where != ("job",):
        return "it is an option of the job and stands in the table [job]"
    if name in {key.name for key in HOST_KEYS}:
        return "it differs from host to host, and stands under [[host]]" if where else "it stands under [[host]]"
    return nearest(name, [*known, *(_TABLES if not where else ())])


def _hosts(data: Mapping[str, Any], folder: Path, mistakes: Mistakes) -> list[dict[str, Any]]:
    """Return the values of each host, merged with [defaults]."""
    defaults = _table(data, "defaults", mistakes)
    shared = _entries(defaults, [key for key in HOST_KEYS if key.shared], ("defaults",), mistakes)
    _use_key(shared, ("defaults",), folder, mistakes)
    entries = _tables(data, "host", mistakes)
    if not data.get("host"):
        mistakes.add((), "there is no host", 'write [[host]], and under it name = "beijing-1" and party = "beijing"')
    found = []
    for index, entry in entries:
        own = _entries(entry, HOST_KEYS, ("host", index), mistakes)
        _use_key(own, ("host", index), folder, mistakes)
        _refuse_ssh(entry, ("host", index), mistakes)
        _refuse_batch(entry, {**shared, **own}, ("host", index), mistakes)
        for key in ("name", "party"):
            if key not in entry:
                mistakes.keys.add(key)
                hint = f'write {key} = "{"beijing-1" if key == "name" else "beijing"}" under it'
                mistakes.add(("host", index), f"this host has no {key}", hint)
        env = {**shared.get("env", {}), **own.get("env", {})}
        found.append({**shared, **own, "env": env})
    return found


def _tables(data: Mapping[str, Any], name: str, mistakes: Mistakes) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the tables of this name, with their index."""
    entries = data.get(name, [])
    if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
        return list(enumerate(entries))
    hint = f"every {name} begins with [[{name}]], in two brackets"
    mistakes.add((name,), f"{name} is {kind_of(entries)} and must be tables", hint)
    return []


def _use_key(table: dict[str, Any], where: tuple[str | int, ...], folder: Path, mistakes: Mistakes) -> None:
    """Make the path of a private key absolute and check its existence."""
    if "key" in table:
        path = (folder / Path(table["key"]).expanduser()).absolute()
        table["key"] = str(path)
        if not path.is_file():
            mistakes.add((*where, "key"), f"there is no private key {path}", "write where it lies on this machine")


def _refuse_ssh(entry: Mapping[str, Any], where: tuple[str | int, ...], mistakes: Mistakes) -> None:
    """Reject SSH keys for a host on this machine."""
    if entry.get("local") is True:
        for key in HOST_KEYS:
            if key.group == "ssh" and key.name != "local" and key.name in entry:
                what = f"{key.name} is for SSH, and local = true means that none is used"
                mistakes.add((*where, key.name), what, "leave one of the two out")


def _refuse_batch(
    entry: Mapping[str, Any], values: Mapping[str, Any], where: tuple[str | int, ...], mistakes: Mistakes
) -> None:
    """Reject keys for an allocator without one, and those of a machine that is known only at launch."""
    if values.get("allocator"):
        given = (*(["fingerprint"] if "login" not in values else []), "local", "ssh", "address", "wan_address")
        what = "the allocator gives the machines, with their addresses"
        hint = "leave it out; login names the login node, interface and wan_interface choose networks"
    elif "allocator" in mistakes.keys:
        return
    else:
        given = tuple(key.name for key in HOST_KEYS if key.group == "batch" and key.name != "allocator")
        what, hint = "it is for machines that an allocator gives", 'write allocator = "slurm" too, or leave it out'
    for name in given:
        if name in entry:
            mistakes.add((*where, name), f"{name}: {what}", hint)


def _table(data: Mapping[str, Any], name: str, mistakes: Mistakes) -> Mapping[str, Any]:
    table = data.get(name, {})
    if isinstance(table, dict):
        return table
    mistakes.add((name,), f"{name} is {kind_of(table)} and must be a table", f"write [{name}], and its keys under it")
    return {}


def _job(data: Mapping[str, Any], mistakes: Mistakes) -> dict[str, Value]:
    """Return the valid options of [job]."""
    known = {option.name: option for option in plugins.table()}
    found: dict[str, Value] = {}
    for name, value in _table(data, "job", mistakes).items():
        try:
            found[name] = _option(name, value, known)
        except InvalidSettings as error:
            mistakes.add(("job", name), error.message, error.hint)
    return found


def _option(name: str, value: Any, known: Mapping[str, Option]) -> Value:
    if name in {key.name for key in TOP_KEYS}:
        hint = "it stands at the top of the file, before the first table"
        raise InvalidSettings(f"{name} is no option of a job", hint)
    if name in ("parties", "workers", "central_workers"):
        raise InvalidSettings(f"{name} follows from the hosts", "leave it out; each entry in devices has a worker")
    option = known.get(name.replace("-", "_"))
    if option is None or option.name != name:
        usual = [other for other, entry in known.items() if entry.group != "cluster"]
        raise InvalidSettings(f"there is no option {name!r}", nearest(name.replace("-", "_"), usual))
    try:
        return _value(option, value)
    except InvalidSettings as error:
        what = error.message.removeprefix(f"{option.flag} ({option.env}): ")
        raise InvalidSettings(f"{name}: {what}", error.hint) from None


def _value(option: Option, value: Any) -> Value:
    """Convert an option's value from text with a unit or from the TOML type of its kind."""
    kind = KINDS[option.kind]
    fits = isinstance(value, (*kind.types, str) if kind.has_unit else kind.types) or (value and value == option.word)
    if not fits or (isinstance(value, bool) and option.kind != "bool"):
        hint = f"write {option.name} = {kind.example}"
        raise InvalidSettings(f"it is {kind_of(value)} and must be {kind.noun}", hint)
    if isinstance(value, str):
        return decode(option, value)
    return check(option, float(value) if option.kind in ("float", "duration") else value)
