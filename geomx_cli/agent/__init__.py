"""The supervisor that runs once for each host and job: `python -m geomx_cli.agent run DIRECTORY`.

    host_spec.py    what the agent is to run, and what it has started: two small files in its directory
    processes.py    what the kernel says about processes, and how to end them
    child.py        one process of the job
    relay.py        starts the agent, and connects the control machine with its socket
    control.py      the socket that the control machine speaks to
    outbox.py       what it has not acknowledged
    status.py       what the agent knows of its part, in a file for whoever looks
    supervisor.py   the loop: start, watch, report, stop
    partial_stop.py ends some processes while the others go on
    oom_watcher.py  whether the kernel has killed a process for want of memory
    safe_open.py    opens files of the job, and nothing else
    reaper.py       ends what a killed agent has left
    stop.py, tail.py, pack.py   what `geomx stop`, `logs` and `logs collect` run on a host

Standard library only, so that an agent starts in a tenth of a second. Messages on the socket are JSON objects, one a
line. To the agent: "hello" (seen: the number of the last message that came by an earlier connection, or 0), "start",
"heartbeat" (seen), "stop" (grace: seconds until SIGTERM; patience: from then until SIGKILL; processes: their names,
without it all; who: who asks), "kill". From it: "hello" (pid, status: see status.py), "alive" (the answer to a
heartbeat), "replaced" (by another control machine); and with a number n, kept until it is acknowledged: "started"
(process, pid), "event" (process, age, event), "failure" (see failure.py), "ended" (process, status, asked: whether
somebody asked for just that), "stopping" (who, patience: somebody else asked for the end of the job), "done" (why it
stopped, "" when all had ended; asked: who asked for it, if somebody did; left: names of what could not be ended).
"""
