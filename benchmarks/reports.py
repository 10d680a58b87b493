"""Measures reports: the summary of a million records, and the live page of a job of 12 processes.

    python benchmarks/reports.py summarize                      100 workers x 10 000 rounds, a file for each worker
    python benchmarks/reports.py summarize --layout esync       the same as a million files
    python benchmarks/reports.py summarize --workers 10 --rounds 1000
    python benchmarks/reports.py dashboard [--screenshot FILE]  needs chromium; watches a job for 20 seconds
"""

import argparse
import contextlib
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from geomx_cli.observe.report.metadata import Metadata
from geomx_cli.observe.report.record import RoundRecord

GEOMX = [sys.executable, "-m", "geomx_cli"]
WATCHED = 20.0


def write_records(folder: Path, workers: int, rounds: int, *, esync: bool) -> None:
    """Records of two local steps and an exchange, with an accuracy in every hundredth record of the first worker; one
    file for each worker, as written by collect, or with `esync` one for each round.
    """
    step = {"get_batch": 0.001, "forward and backward": 0.0213, "local update": 0.0021}
    for worker in range(workers):
        place = folder / f"host{worker // 4}" / f"cpu{worker % 4}"
        place.mkdir(parents=True)
        lines = []
        for number in range(1, rounds + 1):
            accuracy = number / rounds if worker == 0 and number % 100 == 0 else None
            times = {"0": step, "1": step, "2": {"global update": 0.05}}
            record = RoundRecord(
                number, times, 128, 0.1 * number, accuracy, 715_048, 715_048, 0.047, 0.05, 0.04, 0.5
            )
            if esync:
                (place / f"iter-{number}.txt").write_bytes(record.encode())
            else:
                lines.append(record.encode() + b"\n")
        if not esync:
            place.rmdir()
            place.with_name(f"{place.name}.jsonl").write_bytes(b"".join(lines))


def summarize(arguments: argparse.Namespace) -> None:
    """Print the seconds and the largest process's memory. The files were just written, so they are in the page cache.
    """
    with tempfile.TemporaryDirectory(prefix="gxr", dir=arguments.folder) as base:
        esync = arguments.layout == "esync"
        folder = Path(base, "cnn", "hfa", *([] if esync else ["job-1"]))
        write_records(folder, arguments.workers, arguments.rounds, esync=esync)
        Metadata("job-1", "central", {"algo": "hfa"}, network="cnn", mode="hfa").write(folder)
        begun = time.monotonic()
        words = [*GEOMX, "summarize", "-b", base, "-n", "cnn", "-m", "hfa", "--json"]
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
        seconds = time.monotonic() - begun
        samples = json.loads(done.stdout)["samples"]
        assert samples == 128 * arguments.workers * arguments.rounds, samples
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"{arguments.workers * arguments.rounds} records: {seconds:.1f} s, at most {memory:.0f} MB in a process")


@contextlib.contextmanager
def running(words: list[str], environment: dict[str, str]) -> "Iterator[subprocess.Popen[str]]":
    """Run a command until the block ends."""
    process = subprocess.Popen([*GEOMX, *words], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def dashboard(arguments: argparse.Namespace) -> None:
    """Print the seconds until the page has its rows, and the CPU use of the dashboard with all its child processes."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    browsers = importlib.import_module("browser")
    with tempfile.TemporaryDirectory(prefix="gxr") as state, contextlib.ExitStack() as stack:
        environment = {**os.environ, "XDG_STATE_HOME": state}
        words = ["launch", "--local", "--algo", "hfa", "--k1", "5", "--k2", "4", "--eval-every", "10"]
        words += ["--epochs", "1000", "--time-limit", "90s", "--wan", "50mbit,30ms"]
        stack.enter_context(running(words, environment))
        jobs = Path(state, "geomx", "jobs")
        while not list(jobs.glob("*/events/A-worker-0.jsonl")):
            time.sleep(0.1)
        time.sleep(5)
        page = stack.enter_context(running(["dashboard"], environment))
        assert page.stdout is not None
        url = page.stdout.readline().strip()
        with browsers.Browser() as browser:
            begun = time.monotonic()
            browser.resize(1280)
            browser.open(url)
            browser.wait_for("document.querySelectorAll('#processes .process').length === 12")
            loaded = time.monotonic() - begun
            tree = [psutil.Process(page.pid), *psutil.Process(page.pid).children(recursive=True)]
            before = [sum(one.cpu_times()[:2]) for one in tree]
            time.sleep(WATCHED)
            used = sum(sum(one.cpu_times()[:2]) for one in tree) - sum(before)
            if arguments.screenshot:
                browser.resize(1280, browser.value("document.documentElement.scrollHeight"))
                browser.wait_for("document.querySelectorAll('#hosts meter').length > 0")
                browser.screenshot(arguments.screenshot)
        part = f"{100 * used / WATCHED:.1f} % of a core"
        print(f"page usable after {loaded:.2f} s; {len(tree)} processes of the dashboard: {part}")


def main() -> int:
    """Run the requested measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    many = commands.add_parser("summarize")
    many.add_argument("--workers", type=int, default=100)
    many.add_argument("--rounds", type=int, default=10_000)
    many.add_argument("--layout", choices=["runs", "esync"], default="runs")
    many.add_argument("--folder", default=None, help="where the files are written for a while; some 4 GB with esync")
    many.set_defaults(what=summarize)
    page = commands.add_parser("dashboard")
    page.add_argument("--screenshot", type=Path, help="write an image of the page (PNG)")
    page.set_defaults(what=dashboard)
    arguments = parser.parse_args()
    arguments.what(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
