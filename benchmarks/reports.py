"""Measures reports: the summary of a million records, and the live page of a job of 12 processes.

    python benchmarks/reports.py summarize                      100 workers x 10 000 rounds: a million files
    python benchmarks/reports.py summarize --workers 10 --rounds 1000
    python benchmarks/reports.py dashboard                      needs chromium; watches a job for 20 seconds
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

from geomx_cli.observe.report.record import RoundRecord

GEOMX = [sys.executable, "-m", "geomx_cli"]
WATCHED = 20.0


def write_records(folder: Path, workers: int, rounds: int) -> None:
    """Records as written by collect: two local steps, an exchange, an accuracy in every hundredth record of the first
    worker.
    """
    import msgspec

    step = {"get_batch": 0.001, "forward and backward": 0.0213, "local update": 0.0021}
    for worker in range(workers):
        place = folder / f"host{worker // 4}" / f"cpu{worker % 4}"
        place.mkdir(parents=True)
        for number in range(1, rounds + 1):
            accuracy = number / rounds if worker == 0 and number % 100 == 0 else None
            times = {"0": step, "1": step, "2": {"global update": 0.05}}
            record = RoundRecord(
                number, times, 128, 0.1 * number, accuracy, 715_048, 715_048, 0.047, 0.05, 0.04, 0.5
            )
            (place / f"iter-{number}.txt").write_bytes(msgspec.json.encode(record))


def summarize(arguments: argparse.Namespace) -> None:
    """Print the seconds and the largest process's memory. The files were just written, so they are in the page cache.
    """
    with tempfile.TemporaryDirectory(prefix="gxr", dir=arguments.folder) as base:
        write_records(Path(base, "cnn", "hfa"), arguments.workers, arguments.rounds)
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


def dashboard(_: argparse.Namespace) -> None:
    """Print the seconds until the page has its rows, and the CPU use of the dashboard with all its child processes."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    browsers = importlib.import_module("browser")
    with tempfile.TemporaryDirectory(prefix="gxr") as state, contextlib.ExitStack() as stack:
        environment = {**os.environ, "XDG_STATE_HOME": state}
        words = ["launch", "--local", "--algo", "hfa", "--epochs", "1000", "--time-limit", "60s"]
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
            browser.open(url)
            browser.wait_for("document.querySelectorAll('#processes tbody tr').length === 12")
            loaded = time.monotonic() - begun
            tree = [psutil.Process(page.pid), *psutil.Process(page.pid).children(recursive=True)]
            before = [sum(one.cpu_times()[:2]) for one in tree]
            time.sleep(WATCHED)
            used = sum(sum(one.cpu_times()[:2]) for one in tree) - sum(before)
            if shot := os.environ.get("SCREENSHOT"):
                browser.screenshot(Path(shot))
        part = f"{100 * used / WATCHED:.1f} % of a core"
        print(f"page usable after {loaded:.2f} s; {len(tree)} processes of the dashboard: {part}")


def main() -> int:
    """Run the requested measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    many = commands.add_parser("summarize")
    many.add_argument("--workers", type=int, default=100)
    many.add_argument("--rounds", type=int, default=10_000)
    many.add_argument("--folder", default=None, help="where the files are written for a while; some 4 GB")
    many.set_defaults(what=summarize)
    commands.add_parser("dashboard").set_defaults(what=dashboard)
    arguments = parser.parse_args()
    arguments.what(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
