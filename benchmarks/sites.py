"""How long SSH takes for many hosts: N sshd on this machine, each as a host of its own.

    python benchmarks/sites.py [--hosts 4,16]

For each number of hosts it prints the seconds for: connecting to all, one command on each, putting eight files on
each, starting an agent on each until it answers, and stopping all of them with the proof that nothing is left.
"""

import argparse
import getpass
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from geomx_cli.agent.assignment import Assignment, Task
from geomx_cli.fleet import Fleet
from geomx_cli.hosts import SshOptions, everywhere
from geomx_cli.hosts.ssh import SshHost
from geomx_cli.inventory import Ssh
from geomx_cli.job import Job
from geomx_cli.plan import JobSpec
from geomx_cli.ports import free_ports

ROOT = Path(__file__).parent.parent
COLUMNS = ("hosts", "connect", "command", "8 files", "agents", "stop")
SLEEP = "import signal; signal.pause()"


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="4,16", help="numbers of hosts, separated by commas")
    options = parser.parse_args(arguments)
    print("  ".join(f"{name:>8}" for name in COLUMNS))
    for number in (int(text) for text in options.hosts.split(",")):
        with tempfile.TemporaryDirectory(prefix="gx-", dir="/tmp") as folder, _sshds(Path(folder), number) as ssh:
            times = _measure(Path(folder), ssh)
        print("  ".join([f"{number:>8}", *(f"{seconds:>7.2f}s" for seconds in times)]), flush=True)


def _measure(folder: Path, sites: Sequence[Ssh]) -> list[float]:
    options = SshOptions(config="/dev/null", known_hosts=str(folder / "known_hosts"), accept_new_host_keys=True)
    hosts = [
        SshHost(f"h{index}", ssh, sys.executable, package=str(ROOT), options=options)
        for index, ssh in enumerate(sites)
    ]
    times = [
        _time(lambda: everywhere(lambda host: host.run(["true"], limit=60), hosts)),
        _time(lambda: everywhere(lambda host: host.run(["true"], limit=60), hosts)),
        _time(lambda: everywhere(lambda host: _put(folder, host), hosts)),
    ]
    assignments = {host.name: _assignment(folder, host.name) for host in hosts}
    fleet = Fleet(Job.of(JobSpec("", job_dir=str(folder))), {host.name: host for host in hosts}, assignments)
    times.append(_time(lambda: fleet.start({})))
    times.append(_time(lambda: _stop(fleet, len(hosts))))
    for host in hosts:
        host.close()
    return times


def _time(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began


def _put(folder: Path, host: SshHost) -> None:
    for index in range(8):
        host.put(str(folder / host.name / "files" / str(index)), bytes(1000))


def _assignment(folder: Path, name: str) -> Assignment:
    sockets = folder / name / "s"
    return Assignment(
        job=folder.name, host=name, job_dir=str(folder / name), sockets=str(sockets), socket=str(sockets / "a"),
        working_dir="", clear=(), tasks=(Task("sleep", (sys.executable, "-c", SLEEP), {}),),
    )  # fmt: skip


def _stop(fleet: Fleet, number: int) -> None:
    fleet.broadcast({"type": "stop"})
    while number:
        number -= fleet.inbox.get(timeout=60)[1]["type"] == "done"
    if problems := fleet.close():
        sys.exit("\n".join(problems))


@contextmanager
def _sshds(folder: Path, number: int) -> Iterator[list[Ssh]]:
    """So many sshd processes; how each is reached."""
    key = _make_key(folder / "key")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    ports = free_ports(number)
    processes = [_start_sshd(folder, port, key) for port in ports]
    try:
        _wait_for(processes, [folder / f"{port}.log" for port in ports])
        yield [Ssh(address="127.0.0.1", port=port, user=getpass.getuser(), key=str(key)) for port in ports]
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _start_sshd(folder: Path, port: int, key: Path) -> subprocess.Popen[bytes]:
    host_key = _make_key(folder / f"{port}.key")
    lines = [
        f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {host_key}", f"AuthorizedKeysFile {key}.pub",
        "PidFile none", "UsePAM no", "StrictModes no", "PasswordAuthentication no", "MaxStartups 200",
        "PermitRootLogin prohibit-password", "Subsystem sftp internal-sftp", f"SetEnv HOME={folder}",
    ]  # fmt: skip
    config = folder / f"{port}.config"
    config.write_text("\n".join(lines) + "\n")
    return subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", str(config), "-E", str(folder / f"{port}.log")])


def _make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    while not all(log.exists() and "Server listening" in log.read_text() for log in logs):
        if any(process.poll() is not None for process in processes):
            sys.exit("an sshd did not start")
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
