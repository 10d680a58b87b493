"""The supervisor that runs once for each host and job: `python -m geomx_cli.agent DIRECTORY`.

    assignment.py   what the agent is to run, and what it has started: two small files in its directory
    processes.py    what the kernel says about processes, and how to end them
    child.py        one process of the job
    control.py      the socket that the control machine speaks to
    supervisor.py   the loop: start, watch, report, stop
    reaper.py       ends what a killed agent has left

Standard library only, so that an agent starts in a tenth of a second. Messages on the socket are JSON
objects, one a line. To the agent: "start", "heartbeat", "stop" (grace: seconds), "kill". From it: "hello"
(pid), "started" (process, pid), "event" (process, age, event), "failure" (see failure.py), "ended" (process,
status), "alive" (the answer to a heartbeat), "done" (why it stopped, "" when all had ended; left: names of
what could not be ended).
"""
