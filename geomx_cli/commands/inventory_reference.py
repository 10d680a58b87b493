"""Generates docs/reference/inventory.md: `python -m geomx_cli.commands.inventory_reference`."""

from collections.abc import Iterable, Iterator, Mapping

from geomx_cli.core.starter import FOLDER
from geomx_cli.inventory.keys import HOST_KEYS, LINK_KEYS, SSH_KEYS, TOP_KEYS, Group, Key

__all__ = ["page"]

_HEAD = """\
# The inventory: hosts.toml

`python -m geomx_cli.commands.inventory_reference` makes this page from the table of keys.

The inventory file lists the machines of a job, how geomx reaches them, and which processes they run.

| command | use of the file |
|---|---|
| `geomx init` | writes a file to begin with |
| `geomx hosts check` | finds all mistakes in the file, and shows the host of each process |
| `geomx doctor` | checks the machines themselves |
| `geomx launch`, `geomx doctor` | use `hosts.toml` of the working directory |
| `geomx launch`, `geomx doctor` with `--hosts FILE` or `GEOMX_HOSTS` | use FILE |
| `geomx launch`, `geomx doctor` with `--local` | use this machine alone |
| the same in an [allocation of Slurm](../how-to/slurm.md), without a file | use the nodes of the allocation |

The file is [TOML](https://toml.io): keys of the whole job at the top, then `[defaults]` for all hosts, one `[[host]]`
for each machine, and `[job]`. Hosts with the same `party` form a party. It has one worker for each device in the
`devices` of its hosts.

| process | on which host it runs |
|---|---|
| scheduler of a party | the party's first host |
| local servers of a party | one after another on the party's first host, second host, and so on |
| global scheduler | the first host of the central party |
| master worker, for scripts with `--rank-scope party` | the first host of the central party |

The key `runs` of a host changes these defaults. geomx uses the first free ports in the `ports` of a host.

Global ranks number the training workers in the order of the parties in the file, with the central party last. Within a
party the ranks follow the order of the hosts and of their devices. `geomx hosts check` shows the ranks.
"""
_HEADINGS: Mapping[Group, tuple[str, str]] = {
    "file": ("At the top of the file", ""),
    "who": ("Each host: `[[host]]`", "`name` and `party` are required. All other keys have a default."),
    "ssh": (
        "How it is reached",
        "geomx looks up missing values in your `~/.ssh/config`. It compares host keys with your `known_hosts`, or with"
        " `fingerprint`.",
    ),
    "batch": (
        "Machines of a batch system",
        "With `allocator` a `[[host]]` stands for machines that geomx requests at launch. The hosts of several"
        " machines have numbers: `beijing-1`, `beijing-2`. [Slurm](../how-to/slurm.md) has examples. `user`, `key`,"
        " `jump`, `ssh_port` and `fingerprint` then apply to `login`.",
    ),
    "client": (
        "How geomx connects: `[ssh]`",
        "This table is for all hosts. [SSH configuration](../how-to/sites.md#ssh-configuration) says what each client"
        " supports.",
    ),
    "network": (
        "How the others reach it",
        "Other hosts dial only schedulers and servers; workers only dial. But with `--tsengine intra` or `both`,"
        " workers dial each other too. Then each worker that other hosts dial needs a port. `geomx hosts check` shows"
        " the ports. Processes of one host connect by unix sockets. A scheduler always has one of the `ports` as its"
        " name in the job. It does not listen there if all processes that dial it are on its host.",
    ),
    "work": ("What it works with", ""),
    "place": ("What runs on it", "`devices` determines the workers. `runs` is for the other processes."),
    "link": (
        "Unequal links between parties, emulated on one machine: `[[link]]`",
        "`[[link]]` needs `local = true` in all hosts. Each `[[link]]` describes one direction, and overrides `--wan`"
        " for this direction. Processes of a party that use the same link get equal parts of its rate. An emulated link"
        " loses no packets. `geomx hosts check`, `geomx launch` and the dashboard show the emulated links in one line.",
    ),
}
_TABLE_HEAD = "| Key | Example | Without it | Meaning |\n|---|---|---|---|\n"
_TAIL = """
## Options of the job: `[job]`

This table sets [options](options.md) by their names, with underscores: `lr = 0.1`, `time_limit = "2h"`, `window =
"4MiB"`. A flag or an environment variable overrides the table. The table may not set the options of the cluster:
`parties`, `workers` and `central_workers` follow from the hosts, and `topology`, `global_servers` and `local_servers`
are keys at the top of the file.

## Host files of MPI

`geomx launch --hostfile FILE` reads a host file of OpenMPI, MPICH or Intel MPI instead of an inventory. `geomx doctor`,
`geomx data push`, `geomx sweep` and `geomx hosts check` have this option too:

```
# a machine on each line, and its workers
node1 slots=4
alice@node2 slots=4 max_slots=8
node3:4
node4 gpus=2                 # geomx's own: a worker for each of gpu0 and gpu1
n[1-3,07],gpu[01-04] slots=2 # lists as Slurm prints them ($SLURM_JOB_NODELIST); 2*node5 has two workers
2001:db8::1 slots=4          # IPv6, with or without brackets
```

A machine without a number has one worker. If several lines name the same machine, geomx adds their numbers. `max_slots`
has no effect. All machines form one party, and the first machine also runs the global scheduler and the global server.
`party=NAME` on a line puts the machine of this line in the party NAME. MPI does not know this word.
geomx uses no SSH for `localhost` and this machine's host name. All keys of the inventory have their defaults. Set
options by flags and environment variables.

## An example

`geomx init` writes this inventory, which is also `hosts.example.toml`:

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
        "\n## For all hosts: `[defaults]`\n\nThese keys may be in `[defaults]`, and apply to every host without them: "
        f"{shared}. Each host has the variables in `env` of `[defaults]` and in its own `env`.\n"
    )
    return f"{_HEAD}{sections}{defaults}{_TAIL}```toml\n{example}```\n"


def _section(group: Group, keys: Iterable[Key]) -> Iterator[str]:
    heading, text = _HEADINGS[group]
    yield f"\n## {heading}\n\n" + (f"{text}\n\n" if text else "") + _TABLE_HEAD
    for key in keys:
        yield f"| `{key.name}` | `{key.example}` | {key.default} | {key.help} |\n"


if __name__ == "__main__":
    print(page((*TOP_KEYS, *HOST_KEYS, *LINK_KEYS, *SSH_KEYS)), end="")
