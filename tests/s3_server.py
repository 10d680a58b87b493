"""A server of S3's protocol on this machine, with one bucket."""

import contextlib
import os
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
    """environment: in which fsspec finds the server and its credentials."""

    environment: Mapping[str, str]

    @contextlib.contextmanager
    def files(self) -> Iterator[Any]:
        """The server's files, for the block, as fsspec has them."""
        with mock.patch.dict(os.environ, self.environment):
            yield fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)

    def find(self, *ending: str) -> list[str]:
        """The paths of the files with this ending."""
        with self.files() as files:
            return [path for path in files.find(BUCKET) if path.endswith(ending)]


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """A server for the block."""
    (port,) = free_ports(1)
    environment = {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip
    with (folder / "s3.log").open("wb") as log:
        command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        found = S3(environment)
        with found.files() as files:

            def made() -> bool:
                with contextlib.suppress(OSError):
                    files.mkdir(BUCKET)
                    return True
                return False

            until(made, 60, (folder / "s3.log").read_text)
        yield found
    finally:
        server.kill()
        server.wait()
