"""`geomx data push`: what is sent to a host, and what is said of one that cannot get the data set."""

import hashlib
import sys
from pathlib import Path

import pytest

from geomx_cli.datasets.sources import SOURCES
from geomx_cli.hosts import closing
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.jobs.actions.data import error_of, push

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
TEXT = b"It is a truth universally acknowledged\n" * 1000
DIGEST = hashlib.sha256(TEXT).hexdigest()
PYTHON = f"""#!{sys.executable}
import runpy, sys
from geomx_cli.datasets.sources import SOURCES
SOURCES["austen"].digests["austen.txt"] = {DIGEST!r}
sys.argv = sys.argv[sys.argv.index("geomx_cli"):]
runpy.run_module("geomx_cli", run_name="__main__")
"""


@pytest.mark.processes
def test_a_host_with_a_verified_copy_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES["austen"].digests, "austen.txt", DIGEST)  # type: ignore[arg-type]
    python, source, target = tmp_path / "python", tmp_path / "here", tmp_path / "there"
    python.write_text(PYTHON)
    python.chmod(0o755)
    source.mkdir()
    (source / "austen.txt").write_bytes(TEXT)

    def pushed() -> tuple[dict[str, str], set[str], bool]:
        steps: list[str] = []
        with closing({"a1": LocalConnector("a1", str(python))}) as hosts:
            known = list(hosts.values())
            found = push("austen", source, known, str(target), lambda what, done, total: steps.append(what))
        assert not found.errors
        assert (target / "austen.txt").read_bytes() == TEXT
        return found.directories, found.present, "sending austen to a1" in steps

    assert pushed() == ({"a1": str(target)}, set(), True)
    assert pushed() == ({"a1": str(target)}, {"a1"}, False)
    (target / "austen.txt").write_bytes(TEXT[:-1])
    assert pushed() == ({"a1": str(target)}, set(), True), "a damaged copy is replaced"


def test_the_error_of_a_command_is_whole() -> None:
    progress = f"cannot download from {URL}: [Errno -3] Temporary failure in name resolution\n" * 9
    error = f"fashion-mnist cannot be fetched. {URL}: [Errno -3] Temporary failure in name resolution"
    assert error_of(f"{progress}error: {error}\n  on a machine with Internet access {'download ' * 90}") == error
    assert error_of(f"error: {error} {'x' * 600}") == f"{error} ..."


def test_the_end_of_other_output_begins_with_a_word() -> None:
    assert error_of("Killed\n") == "Killed"
    assert error_of("") == ""
    shown = error_of(f"{URL} " * 20)
    assert shown == f"... {' '.join([URL] * (len(shown) // (len(URL) + 1)))}" and len(shown) > 400
