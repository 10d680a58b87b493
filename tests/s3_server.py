"""Servers of S3's protocol on this machine: one that keeps files, and one that never answers."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
from cluster import free_ports, until

BUCKET = "models"


@dataclass(frozen=True)
class S3:
    """A server with one bucket. environment: in which fsspec finds it and its credentials. files: as fsspec has them.
    """

    environment: Mapping[str, str]
    files: Any

    def find(self, ending: str = "") -> list[str]:
        """The paths of the files with this ending."""
        return [path for path in self.files.find(BUCKET) if path.endswith(ending)]


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """A server for the block."""
    (port,) = free_ports(1)
    with (folder / "s3.log").open("wb") as log:
        command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: answers(port), 60, (folder / "s3.log").read_text)
        environment = environment_for(port)
        with mock.patch.dict(os.environ, environment):
            files = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
            files.mkdir(BUCKET)
        yield S3(environment, files)
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def silent_s3() -> Iterator[Mapping[str, str]]:
    """A server for the block that accepts connections, and never answers; gives the environment for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield environment_for(listener.getsockname()[1])


def environment_for(port: int) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
