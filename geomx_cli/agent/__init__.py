"""The supervisor that runs once for each host and job: `python -m geomx_cli.agent run DIRECTORY`.

    assignment.py   what the agent is to run, and what it has started: two small files in its directory
    processes.py    what the kernel says about processes, and how to end them
    child.py        one process of the job
    relay.py        starts the agent, and connects the control machine with its socket
    control.py      the socket that the control machine speaks to
    outbox.py       what it has not acknowledged
    supervisor.py   the loop: start, watch, report, stop
    reaper.py       ends what a killed agent has left

Standard library only, so that an agent starts in a tenth of a second. Messages on the socket are JSON
objects, one a line. To the agent: "hello" (seen: the number of the last message that came by an earlier
connection, or 0), "start", "heartbeat" (seen), "stop" (grace: seconds), "kill". From it: "hello"
(pid, status: see status.py), "alive" (the answer to a heartbeat), "replaced" (by another control machine); and
with a number n, kept until it is acknowledged: "started" (process, pid), "event" (process, age, event),
"failure" (see failure.py), "ended" (process, status), "done" (why it stopped, "" when all had ended; left: names
of what could not be ended).
"""
