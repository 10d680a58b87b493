#!/usr/bin/env python3
"""Stand-in programs for roles, run by the real plan, launch and agents.

python stand_in.py -m geomx_cli.runtime      a stand-in: inventories name this file as their Python
python stand_in.py -m MODULE ...             any other module of geomx, for real

STORY in the environment is a JSON object: process name -> behaviour. By default workers train three rounds, and others
serve until all workers are done. "saves" saves files in its output folder, and trains; "spills" saves
them, and finds its disk full. "ends" exits at once. "forever"
runs until killed; "raise" raises; "deaf" ignores SIGTERM and runs forever;
"traps" saves files 1.5 s after SIGTERM, and exits; "family" has a child in its own session and
runs forever; "blame X" fails, naming X. The following wait for a file "go" in the job's directory: "wait" then behaves
as by default; "misses X" fails, naming X; "fails" raises.
"""

# Hundreds of them run in a test suite: what few of them need is imported there, and no pathlib.
import json
import os
import signal
import sys
import time

ROUNDS, ACCURACY = 3, 0.75


def say(event: str, **fields: object) -> None:
    """Append an event to this process's event log."""
    name = os.environ["GEOMX_PROCESS"].replace("/", "-").replace(":", "-")
    folder = f"{os.environ['GEOMX_JOB_DIR']}/events"
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    with open(f"{folder}/{name}.jsonl", "a") as file:  # noqa: PTH123
        file.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\n")


def play() -> None:
    """Act as the role in the environment."""
    name = os.environ["GEOMX_PROCESS"]
    story = json.loads(os.environ["STORY"])
    print(f"{name} begins", flush=True)
    match story.get(name, story.get("*", "")).split():
        case ["raise"]:
            raise ValueError("the data set is not there")
        case ["blame", peer]:
            say("failed", message=f"{peer} is silent", hint="look at it", peer=peer)
            sys.exit(1)
        case ["deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            forever()
        case ["traps"]:
            signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), save(name), sys.exit()))
            forever()
        case ["ends"]:
            return
        case ["saves"]:
            save(name)
            train()
            return
        case ["spills"]:
            import errno

            save(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        case ["family"]:
            import subprocess

            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            forever()
        case ["forever"]:
            forever()
        case ["wait"]:
            wait()
        case ["fails"]:
            wait()
            raise ValueError("the data set is not there")
        case ["misses", peer]:
            wait()
            say("failed", message=f"{peer} is silent", peer=peer)
            sys.exit(1)
    if os.environ.get("DMLC_ROLE") == "worker":
        train()
        open(f"{os.environ['GEOMX_JOB_DIR']}/done-{os.getpid()}", "w").close()  # noqa: PTH123
    else:
        serve()


def save(name: str) -> None:
    """Save a large file, a small one in a folder, and a link that leads elsewhere."""
    from pathlib import Path

    folder = Path(os.environ["GEOMX_OUTPUT_DIR"])
    (folder / "model.bin").write_bytes(name.encode() * 50_000)
    (folder / "notes").mkdir()
    (folder / "notes" / "a b.txt").write_text(name)
    (folder / "passwords").symlink_to("/etc/passwd")


def forever() -> None:
    """Wait to be killed."""
    say("state", state="training")
    while True:
        signal.pause()


def wait() -> None:
    """Wait until the file "go" exists."""
    say("state", state="training")
    while not os.path.exists(f"{os.environ['GEOMX_JOB_DIR']}/go"):  # noqa: PTH110
        time.sleep(0.02)


def train() -> None:
    """Three rounds, and the byte counts that a worker reports."""
    for number in range(1, ROUNDS + 1):
        samples = 64 if number < ROUNDS else 24  # the last batch of an epoch is smaller
        total = min(64 * number, 64 * (ROUNDS - 1) + 24)
        say("round", num_iters=number, num_samples=samples, samples=total, total_time=number * 0.5, loss=1 / number)
    say("telemetry", state="training", round=ROUNDS, bytes={"lan": [100, 200], "wan": [7, 9]}, progress=1.0)
    say("evaluation", round=ROUNDS, accuracy=ACCURACY)
    say("telemetry", state="finished", round=ROUNDS, bytes={"lan": [100, 200], "wan": [7, 9]}, progress=1.0)


def serve() -> None:
    """Wait until all workers are done."""
    workers = int(os.environ["STAND_INS"])
    while sum(name.startswith("done-") for name in os.listdir(os.environ["GEOMX_JOB_DIR"])) < workers:  # noqa: PTH208
        time.sleep(0.02)
    say("telemetry", state="finished")  # else an agent would try for 10 s to tell others that it has never joined


if __name__ == "__main__":
    if sys.argv[1:4] == ["-P", "-m", "geomx_cli.runtime"]:
        play()
    else:
        import runpy

        sys.argv = sys.argv[3:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
