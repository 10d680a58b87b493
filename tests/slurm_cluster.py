"""A real Slurm on this machine, for tests: four nodes in two partitions, with a folder, ports and keys of its own."""

import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from cluster import free_ports, until

PARTITIONS = {"p": ("n1", "n2"), "q": ("n3", "n4")}
_NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
_PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"


def missing() -> str:
    """Why no Slurm can run here; "" if one can."""
    absent = [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"there is no {', '.join(absent)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class SlurmCluster:
    """Its daemons run until `stop`. conf: the SLURM_CONF for its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> "SlurmCluster":
        """Start it, and wait until all nodes are idle."""
        nodes = [node for each in PARTITIONS.values() for node in each]
        for name in ("state", *(f"spool/{node}" for node in nodes)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        own = {name: self.folder / f"munge.{name}" for name in ("socket", "log-file", "pid-file", "seed-file")}
        own["key-file"] = key
        self._run("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in own.items()))
        until(own["socket"].exists, 10, own["log-file"].read_text)
        self.conf.write_text(self._configuration(nodes))
        self._run("slurmctld", "-D")
        for node in nodes:
            self._run("slurmd", "-D", "-N", node)
        states = ("sinfo", "--noheader", "--Node", "--format=%t")
        until(lambda: self.call(*states).split() == ["idle"] * len(nodes), 60, self._logs)
        return self

    def call(self, *command: str) -> str:
        """Run one of its commands, and return its output."""
        done = subprocess.run(
            command, env={**os.environ, "SLURM_CONF": str(self.conf)}, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def jobs(self) -> dict[str, tuple[int, str]]:
        """Ids and states of jobs that have not ended, by the last part of their names: the request."""
        lines = self.call("squeue", "--noheader", "--format=%j|%i|%T").splitlines()
        found = (line.strip().split("|") for line in lines)
        return {name.rpartition("-")[2]: (int(job), state) for name, job, state in found}

    def set_nodes(self, nodes: str, state: str) -> None:
        """Change the state of nodes, as their administrator does."""
        assert not self.call("scontrol", "update", f"nodename={nodes}", f"state={state}", "reason=test")

    def repair(self) -> None:
        """Make all nodes usable again; Slurm refuses that for one on which a job is still ending."""

        def usable() -> bool:
            lines = self.call("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
            bad = [line.split()[0] for line in lines if not line.endswith("idle")]
            if bad:
                self.call("scontrol", "update", f"nodename={','.join(bad)}", "state=resume")
            return not bad

        until(usable, 30, self._logs)

    def stop(self) -> None:
        """End all daemons and what they have started."""
        self.call("scancel", "--user=root", "--signal=KILL", "--full")
        for process in reversed(self._daemons):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._daemons:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:  # slurmd waits for steps that are still ending
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)

    def _run(self, *command: str) -> None:
        environment = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": _PATH}
        nothing = subprocess.DEVNULL
        self._daemons.append(
            subprocess.Popen(
                command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
            )
        )

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))

    def _configuration(self, nodes: list[str]) -> str:
        name, ports, folder = socket.gethostname().split(".")[0], free_ports(len(nodes) + 1), self.folder
        settings = {
            "ClusterName": "tests", "SlurmctldHost": f"{name}(127.0.0.1)", "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder}/munge.socket", "CredType": "cred/munge", "SlurmUser": "root",
            "SlurmdUser": "root", "StateSaveLocation": folder / "state", "SlurmdSpoolDir": folder / "spool/%n",
            "SlurmctldPidFile": folder / "ctld.pid", "SlurmdPidFile": folder / "d-%n.pid",
            "SlurmctldLogFile": folder / "ctld.log", "SlurmdLogFile": folder / "d-%n.log",
            "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "MpiDefault": "none",
            "ReturnToService": 2, "SchedulerType": "sched/backfill", "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core", "SlurmctldPort": ports[0], "KillWait": 5,
            "SchedulerParameters": "sched_interval=1,bf_interval=1", "SlurmdParameters": "config_overrides",
        }  # fmt: skip
        lines = [f"{key}={value}" for key, value in settings.items()]
        for node, port in zip(nodes, ports[1:], strict=True):
            lines.append(f"NodeName={node} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=16 State=UNKNOWN")
        for number, (partition, members) in enumerate(PARTITIONS.items()):
            default = "YES" if number == 0 else "NO"
            lines.append(f"PartitionName={partition} Nodes={','.join(members)} Default={default} OverSubscribe=FORCE:8")
        return "\n".join(lines) + "\n"
