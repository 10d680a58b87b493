"""A trial of several algorithms with the geomx command: launch, collect, summarize and draw.

    python benchmarks/trial.py cnn --to results                    to test accuracy 0.80
    python benchmarks/trial.py resnet18-v1 --to results            for 90 seconds each
    python benchmarks/trial.py cnn --to results --algo hfa fsa     some of the algorithms only

Two parties of two workers on this machine, the last worker 4 times as slow, links between parties shaped inside the
transport. So this compares algorithms, not systems. Each job is collected to the folder, where geomx draw and geomx
compare find it; figures are written to FOLDER/NETWORK/figures.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ALGORITHMS: Mapping[str, Sequence[str]] = {
    "esync": ("--algo", "esync"),
    "sync": ("--algo", "sync"),
    "async": ("--algo", "async", "--momentum", "0"),
    "dcasgd": ("--algo", "async", "--optimizer", "dcasgd", "--momentum", "0"),
    "hfa": ("--algo", "hfa"),
    "fsa": ("--algo", "fsa"),
    "mixed": ("--algo", "mixed", "--momentum", "0"),
    "diloco": ("--algo", "diloco", "--outer-momentum", "0.5"),
}
USUAL = ("esync", "sync", "async", "dcasgd", "hfa")
NETWORKS: Mapping[str, Sequence[str]] = {
    "cnn": ("--target-accuracy", "0.8", "--eval-every", "20", "--time-limit", "180s", "--wan", "50mbit,30ms"),
    "resnet18-v1": ("--time-limit", "90s", "--eval-every", "0", "--batch-size", "32", "--wan", "500mbit,30ms"),
}
TUNED: Mapping[tuple[str, str], Sequence[str]] = {
    ("cnn", "esync"): ("--min-local-steps", "12"),
    ("cnn", "async"): ("--lr", "0.5"),
    ("cnn", "dcasgd"): ("--lr", "0.2"),
    ("cnn", "hfa"): ("--k1", "20", "--k2", "5"),
    ("cnn", "diloco"): ("--inner-steps", "30"),
    ("resnet18-v1", "hfa"): ("--k1", "4", "--k2", "2"),
    ("resnet18-v1", "diloco"): ("--inner-steps", "8"),
}
CLUSTER = ("--local", "--parties", "2", "--workers", "2", "--slowdown", "4", "--epochs", "100")


def geomx(*arguments: str) -> str:
    """Run geomx and return its output; its progress messages stay visible."""
    print(f"$ geomx {' '.join(arguments)}", file=sys.stderr, flush=True)
    words = [sys.executable, "-m", "geomx_cli", *arguments]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout


def run(network: str, names: Sequence[str], base: Path) -> None:
    """Train with each algorithm, and make all summaries and figures."""
    for name in names:
        options = [*CLUSTER, "--network", network, *NETWORKS[network], *ALGORITHMS[name]]
        result = json.loads(geomx("launch", *options, *TUNED.get((network, name), ()), "--json"))
        geomx("logs", "collect", result["job"], "--to", str(base))
        words = ("--base", str(base), "--network", network, "--mode", name, "--run", result["job"])
        print(geomx("summarize", *words))
    print(geomx("draw", "--base", str(base), "--network", network))
    print(geomx("compare", str(base / network)))


def main() -> int:
    """Run the requested algorithms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=list(NETWORKS))
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where everything is collected")
    parser.add_argument("--algo", nargs="+", choices=list(ALGORITHMS), default=list(USUAL), metavar="NAME")
    arguments = parser.parse_args()
    try:
        run(arguments.network, arguments.algo, arguments.to.absolute())
    except subprocess.CalledProcessError as error:
        return error.returncode
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
