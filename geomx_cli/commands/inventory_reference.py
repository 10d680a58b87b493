"""Generates docs/reference/inventory.md: `python -m geomx_cli.commands.inventory_reference`."""

from collections.abc import Iterable, Iterator, Mapping

from geomx_cli.core.starter import FOLDER
from geomx_cli.inventory.keys import HOST_KEYS, LINK_KEYS, TOP_KEYS, Group, Key

__all__ = ["page"]

_HEAD = """\
# The inventory: hosts.toml

This page is made from the table of keys by `python -m geomx_cli.commands.inventory_reference`.

One file says which machines there are, how geomx reaches them, and what runs where.

| command | use of the file |
|---|---|
| `geomx init` | writes one to begin with |
| `geomx hosts check` | finds all mistakes in it, and shows what will run where |
| `geomx doctor` | checks the machines themselves |
| `geomx launch`, `geomx doctor` | use `hosts.toml` of the working directory |
| the same with `--hosts FILE` or `GEOMX_HOSTS` | use that file |
| the same with `--local` | use this machine alone |

The file is [TOML](https://toml.io): keys of the whole job at the top, then `[defaults]` for all hosts, one `[[host]]`
for each machine, and `[job]`. Hosts with the same `party` are a party, which has a worker for each of their `devices`.
The first host of a party runs its scheduler, and its hosts in turn its servers. The first host of the central party
also has the global scheduler, and for scripts with `--rank-scope party` the master worker. `runs` changes that.
geomx takes the first ports of a host's range that are free.

Global ranks count the training workers in the order of the parties in the file, the central party last, and in a party
in the order of its hosts and of their devices. `geomx hosts check` shows them.
"""
_HEADINGS: Mapping[Group, tuple[str, str]] = {
    "file": ("At the top of the file", ""),
    "who": ("Each host: `[[host]]`", "`name` and `party` must be there; all the rest has a default."),
    "ssh": (
        "How it is reached",
        "What is left out is looked up in your `~/.ssh/config`. Host keys are checked against your `known_hosts`, or"
        " against `fingerprint`.",
    ),
    "network": (
        "How the others reach it",
        "Only hosts of schedulers and servers are dialled, and only where a process of another host needs them:"
        " `geomx hosts check` shows the ports. Everybody else dials out; with `--tsengine intra` or `both` workers dial"
        " each other too, and their hosts need a port for each that other hosts dial. Processes of one host use unix"
        " sockets; a scheduler takes one of `ports` also then, which identifies it, and which nothing listens on.",
    ),
    "work": ("What it works with", ""),
    "place": ("What runs on it", "Workers follow from `devices`, wherever the rest runs."),
    "link": (
        "Unequal links between parties, emulated on one machine: `[[link]]`",
        "Where all hosts have `local = true`. Each is one direction, and overrides `--wan`, which is for all"
        " others. Processes of a party that share a link get equal parts of its rate. Nothing is lost: what they send"
        " travels over TCP. `geomx hosts check`, launch and the dashboard show the emulated network in a line.",
    ),
}
_TABLE_HEAD = "| Key | Example | Without it | Meaning |\n|---|---|---|---|\n"
_TAIL = """
## Options of the job: `[job]`

Each [option](options.md) may stand here by its name, with underscores: `lr = 0.1`, `time_limit = "2h"`, `window =
"4MiB"`. A flag or an environment variable overrides it. Options of the cluster may not: `parties`, `workers` and
`central_workers` follow from the hosts, and `topology`, `global_servers` and `local_servers` stand at the top.

## Host files of MPI

`geomx launch --hostfile FILE` takes a host file of OpenMPI, MPICH or Intel MPI in place of an inventory, as do `geomx
doctor`, `data`, `sweep` and `hosts check`:

```
# a machine on each line, and its workers
node1 slots=4
alice@node2 slots=4 max_slots=8
node3:4
node4 gpus=2                 # geomx's own: a worker for each of gpu0 and gpu1
n[1-3,07],gpu[01-04] slots=2 # lists as Slurm prints them ($SLURM_JOB_NODELIST); 2*node5 has two workers
2001:db8::1 slots=4          # IPv6, with or without brackets
```

A machine without a number has one worker; one that is there several times has their sum; `max_slots` has no effect.
All machines are one party, and the first one also runs the global scheduler and server. `party=NAME` on a line puts
its machine in a party, as `party` of a host does; MPI does not know it. `localhost` and this machine's host name need
no SSH. Everything else has its default, and options come from flags and the environment.

## An example

`geomx init` writes this one, which is also `hosts.example.toml`:

"""


def page(keys: Iterable[Key]) -> str:
    """Return the page as Markdown."""
    groups: dict[Group, list[Key]] = {}
    for key in keys:
        groups.setdefault(key.group, []).append(key)
    example = (FOLDER / "hosts.toml").read_text(encoding="utf-8")
    sections = "".join("".join(_section(group, members)) for group, members in groups.items())
    shared = ", ".join(f"`{key.name}`" for key in HOST_KEYS if key.shared)
    defaults = (
        "\n## For all hosts: `[defaults]`\n\nThese keys may stand here and hold for every host without them: "
        f"{shared}. Variables in `env` are added to those of the host.\n"
    )
    return f"{_HEAD}{sections}{defaults}{_TAIL}```toml\n{example}```\n"


def _section(group: Group, keys: Iterable[Key]) -> Iterator[str]:
    heading, text = _HEADINGS[group]
    yield f"\n## {heading}\n\n" + (f"{text}\n\n" if text else "") + _TABLE_HEAD
    for key in keys:
        yield f"| `{key.name}` | `{key.example}` | {key.default} | {key.help} |\n"


if __name__ == "__main__":
    print(page((*TOP_KEYS, *HOST_KEYS, *LINK_KEYS)), end="")
