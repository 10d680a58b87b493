"""python -m geomx_cli.runtime [SCRIPT [ARGUMENTS]]: becomes the process of a job that the environment describes.

A scheduler or server takes no arguments. A worker runs SCRIPT, in which mx.kv.create("dist_sync") returns geomx's
store, or without SCRIPT the bundled training job. Without any DMLC_* variable, SCRIPT runs standalone, as the only
worker. `geomx launch` sets the variables of all processes; to start processes by hand, set them as follows.
"""

import gc
import os
import signal
import sys
from pathlib import Path

from geomx_cli.contract import settings as variables
from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError, InvalidSettings, PeerLost, TrainingFailed
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import ProcessFailed, ProcessFinished, StateChanged
from geomx_cli.runtime import frontends
from geomx_cli.runtime.plugin_factory import event_log, part, warn_of_variables
from geomx_cli.runtime.signals import Signals, interrupted
from geomx_cli.runtime.stop_notice import pass_on_signals


def main(argv: list[str]) -> int:
    """Run the role to its end; return the exit status (see errors.py)."""
    if argv[:1] in (["--help"], ["-h"]):
        _, _, of_variables = str(variables.__doc__).partition("\n\n")
        print(f"{__doc__}\n{of_variables}".strip())
        return 0
    events, launched = EventLog(None), False
    try:
        if argv and variables.none_are_set():
            _begin_alone(argv[0])
        settings = Settings.from_environment(plugins.table())
        events, launched = event_log(settings), bool(settings.job)
        if settings.role != "worker" or not argv:  # a script's session reports it itself
            warn_of_variables(events, settings)
        if settings.role == "worker":
            _work(settings, events, argv)
        else:
            _serve(settings, events)
    except (GeomxError, KeyboardInterrupt) as caught:
        error = caught if isinstance(caught, GeomxError) else interrupted(caught)
        _say(events, error, launched=launched)
        if frontends.loaded():
            sys.stdout.flush()
            os._exit(error.exit_code)  # a normal exit would make MXNet wait for operations that never complete
        return error.exit_code
    if settings.role != "worker":
        events.write(ProcessFinished())
    return 0


def _begin_alone(script: str) -> None:
    from geomx_cli.runtime import standalone

    text = f"there are no DMLC_* variables: {script} runs alone, as the only worker"
    hint = f"to train on several: geomx launch -- python {script}, or set DMLC_* variables (--help)"
    print(f"{text}\n  {hint}", file=sys.stderr, flush=True)
    standalone.begin()


def _work(settings: Settings, events: EventLog, argv: list[str]) -> None:
    if argv:
        from geomx_cli.runtime import script
        from geomx_cli.runtime.frontends import finder

        if not Path(argv[0]).exists():
            raise InvalidSettings(f"there is no script {argv[0]}", f"it is looked for in {Path.cwd()}")
        signals = None if settings.job else Signals()
        if signals is not None:
            signals.watch(script.session().notify)
        finder.install()
        _collect_from_now_on()
        script.run(argv, signals)
        return
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.bundled import job
    from geomx_cli.runtime.script import reports
    from geomx_cli.runtime.training import parting

    if parting.has_begun(settings):
        parting.end(settings, events)
        return

    signals = None if settings.job else Signals()
    client = Client(settings, events, part(settings, "delivery", "worker")())
    if signals is not None:
        signals.watch(client.close)
    _collect_from_now_on()
    reports.begin(events)  # for a user's own network or data
    try:
        job.main(client)
        client.leave()
        parting.begin(settings)
        client.close()
    except (Exception, KeyboardInterrupt) as error:
        interruption = interrupted(error) if isinstance(error, KeyboardInterrupt) else None
        cause = interruption or client.failure or error  # MXNet re-raises engine failures as its own errors
        client.close(cause if isinstance(cause, GeomxError) else TrainingFailed(repr(error)))
        if cause is error:
            raise
        raise cause from None
    finally:
        reports.close()


def _serve(settings: Settings, events: EventLog) -> None:
    signals = None if settings.job else Signals()
    if settings.role.endswith("scheduler"):
        from geomx_cli.ps.cluster.scheduler import Scheduler

        plane = settings.upper if settings.role == "global_scheduler" else settings.local
        assert plane is not None
        scheduler = Scheduler(settings, plane, events)
        if signals is not None:
            signals.deliver_to(scheduler.node.loop.interrupt)
        if settings.supervised:
            pass_on_signals(scheduler.node.loop.submit, events, settings.stop_file)
        _collect_from_now_on()
        scheduler.run()
        return
    from geomx_cli.ps.server import Server

    algorithm, delivery = part(settings, "algo", "server")(settings), part(settings, "delivery", "server")()
    server = Server(settings, events, algorithm, delivery)
    if signals is not None:
        signals.deliver_to(server.node.loop.interrupt)
    if settings.supervised:
        pass_on_signals(server.node.loop.submit, events, settings.stop_file)
    _collect_from_now_on()
    optimizer = server.run()
    if settings.output_dir and optimizer is not None:
        from geomx_cli.runtime.bundled import checkpoint

        if settings.supervised:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SIGKILL follows at the end of the grace
        events.write(StateChanged(state="saving"))  # it may take long, and no other process waits for it
        checkpoint.save_optimizer(Path(settings.output_dir), optimizer, server.optimizer_state(), events.warn)


def _collect_from_now_on() -> None:
    """Re-enable the garbage collector; objects loaded so far are frozen, so that it does not scan them."""
    gc.freeze()
    gc.enable()


def _say(events: EventLog, error: GeomxError, *, launched: bool) -> None:
    """Report the failure. `launched`: an agent reads the event log, which has the cause in every case."""
    blame = error.blame if isinstance(error, PeerLost) else PeerLost("").blame
    events.write(ProcessFailed(message=error.message, hint=error.hint, **blame))
    text, peer = error.message + (f"\n  {error.hint}" if error.hint else ""), blame["peer"]
    if peer and blame["observer"] == peer:  # the peer's own error, which is in its log
        text = f"{peer} failed, and the job with it; its log says why" if launched else f"{peer}: {text}"
    print(f"error: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    gc.disable()  # importing creates no garbage, and scanning for it takes an eighth of the import time
    sys.exit(main(sys.argv[1:]))
