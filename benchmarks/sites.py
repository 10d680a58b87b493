"""Measures the steps of a job on many hosts, emulated by N sshd processes on this machine.

    python benchmarks/sites.py [--hosts 4,16,64] [--client paramiko,openssh]

One host is the central party; the others form parties of three, each host with one worker that only waits. Prints the
seconds of each command: `geomx launch --detach` until all agents run, and until it returns; `geomx status`;
`geomx logs collect`; `geomx stop` including its check that nothing is left.
"""

import argparse
import getpass
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from geomx_cli.hosts.ports import free_ports
from geomx_cli.inventory import Ssh
from geomx_cli.inventory.access import SshClient

COLUMNS = ("hosts", "client", "agents", "launch", "status", "collect", "stop")
PARTY = 3
SETTLE = 10.0
WAIT = "import signal; signal.pause()"


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="4,16,64", help="numbers of hosts, separated by commas")
    clients = ", ".join(get_args(SshClient))
    parser.add_argument("--client", default="auto", help=f"what connects to the hosts, separated by commas: {clients}")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(arguments)
    if unknown := set(options.client.split(",")) - set(get_args(SshClient)):
        parser.error(f"--client {', '.join(unknown)}: choose from {clients}")
    found, out = [], sys.stderr if options.json else sys.stdout
    print("  ".join(f"{name:>8}" for name in COLUMNS), file=out)
    for number, client in itertools.product(map(int, options.hosts.split(",")), options.client.split(",")):
        with tempfile.TemporaryDirectory(prefix="gx-", dir="/tmp") as folder, _sshds(Path(folder), number) as ssh:
            times = _measure(Path(folder), ssh, client)
        found.append(dict(zip(COLUMNS, (number, client, *times), strict=True)))
        seconds = (f"{each:>7.2f}s" for each in times)
        print("  ".join([f"{number:>8}", f"{client:>8}", *seconds]), file=out, flush=True)
    if options.json:
        print(json.dumps({"schema_version": 1, "results": found}))


def _measure(folder: Path, sites: Sequence[Ssh], client: str) -> list[float]:
    (folder / "hosts.toml").write_text(f'{_inventory(folder, sites)}\n[ssh]\nclient = "{client}"\n')
    (folder / "wait.py").write_text(WAIT)
    agents, launched = _geomx(folder, "launch", "--detach", "--accept-new-host-keys", "--", "python", "wait.py")
    try:
        # let the processes of all hosts, which start on this one machine, finish starting: that is not to be measured
        time.sleep(SETTLE)
        status = _geomx(folder, "status")[1]
        collected = _geomx(folder, "logs", "collect", "--to", "collected")[1]
    finally:
        stopped = _geomx(folder, "stop")[1]
    return [agents, launched, status, collected, stopped]


def _geomx(folder: Path, *words: str) -> tuple[float, float]:
    """Run a command; the seconds until it mentioned agents, and until its end. Exits this program if it fails."""
    env = {**os.environ, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    began, agents = time.monotonic(), 0.0
    with subprocess.Popen(
        [sys.executable, "-m", "geomx_cli", *words], cwd=folder, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        drain = threading.Thread(target=process.stdout.read)
        drain.start()
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("agents ready"):
                agents = time.monotonic() - began
        drain.join()
    if process.returncode:
        sys.exit(f"geomx {' '.join(words)} ended with status {process.returncode}:\n{''.join(said)}")
    return agents, time.monotonic() - began


def _inventory(folder: Path, sites: Sequence[Ssh]) -> str:
    lines = ['central = "hub"', "", "[defaults]", f'python = "{sys.executable}"', ""]
    for index, ssh in enumerate(sites):
        name = f"p{(index - 1) // PARTY}" if index else "hub"
        lines += ["[[host]]", f'name = "h{index}"', f'party = "{name}"', f'ssh = "{ssh.address}"']
        lines += [f"ssh_port = {ssh.port}", f'user = "{ssh.user}"', f'key = "{ssh.key}"']
        lines += [f'state_dir = "{folder}/h{index}"', f'ports = "{10_000 + 4 * index}-{10_003 + 4 * index}"']
        lines += ['devices = ["cpu"]', ""] if index else [""]
    return "\n".join(lines)


@contextmanager
def _sshds(folder: Path, number: int) -> Iterator[list[Ssh]]:
    """Start `number` sshd processes; yields their connection settings."""
    key = make_key(folder / "key")
    ports = free_ports(number)
    processes = [subprocess.Popen(sshd(folder, str(port), "127.0.0.1", port, key, home=folder)) for port in ports]
    try:
        wait_for(processes, [folder / f"{port}.log" for port in ports])
        yield [Ssh(address="127.0.0.1", port=port, user=getpass.getuser(), key=str(key)) for port in ports]
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def sshd(folder: Path, name: str, address: str, port: int, key: Path, home: Path) -> list[str]:
    """The command of an sshd, whose files are FOLDER/NAME.*, which admits `key`. home: of its sessions."""
    host_key = make_key(folder / f"{name}.key")
    lines = [
        f"Port {port}", f"ListenAddress {address}", f"HostKey {host_key}", f"AuthorizedKeysFile {key}.pub",
        "PidFile none", "UsePAM no", "StrictModes no", "PasswordAuthentication no", "MaxStartups 200",
        "PermitRootLogin prohibit-password", "Subsystem sftp internal-sftp", f"SetEnv HOME={home}",
    ]  # fmt: skip
    config = folder / f"{name}.config"
    config.write_text("\n".join(lines) + "\n")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    return ["/usr/sbin/sshd", "-D", "-f", str(config), "-E", str(folder / f"{name}.log")]


def make_key(path: Path) -> Path:
    """Create a pair of SSH keys, and return the private one."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def wait_for(processes: Sequence["subprocess.Popen[Any]"], logs: Sequence[Path]) -> None:
    """Wait until each sshd listens. Ends this program if one has ended."""
    while not all(log.exists() and "Server listening" in log.read_text() for log in logs):
        if any(process.poll() is not None for process in processes):
            sys.exit("an sshd did not start")
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
