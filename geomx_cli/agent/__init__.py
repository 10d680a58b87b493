"""Per-host supervisor of one job: `python -m geomx_cli.agent run DIRECTORY`.

    host_spec.py    the agent's spec and the record of started processes: two small files in its directory
    processes.py    process inspection through /proc, and termination
    child.py        one process of the job
    incarnation.py  one life of it: pid, status, signs of life
    event_tail.py   its event log, as forwarded
    restart_policy.py, next_life.py  whether a process that died is started again
    state_folder.py the folder in which processes keep what survives them
    checkpoints.py  copies of that folder, from which another job goes on
    stored.py, uploads.py  copies of these in a store beyond the hosts, and how the agent makes them
    output_log.py   its log
    outputs.py      what it saves
    relay.py        starts the agent and relays between the control machine and its socket
    control.py      the agent's listening socket, and the messages that are not acknowledged yet
    status.py       the agent's status file
    host_usage.py   use of the host's processors, memory and GPUs
    supervisor.py   the main loop: start, monitor, report, stop
    beginning.py    what processes begin with: folders for their states, variables, numbers of their lives
    groups.py, group_restarts.py  workers that begin again together
    stopping.py     requests to stop
    lifecycle.py    the stages of the end, from waiting for "start" to SIGKILL, and their deadlines; stops of one party
    presence.py     tells schedulers of processes that cannot speak themselves
    diagnosis.py    processes that are stopped or hang, want of memory, full disks
    streams.py, tail.py, stop.py, prune.py   host side of `geomx logs collect` and `fetch`, of `logs`, of `stop` and of
                    `jobs prune`

Standard library only, so that an agent starts in 0.1 s. Messages on the socket are JSON objects, one per line.

To the agent: "hello" (seen: number of the last message received on an earlier connection, or 0), "start" (ignored once
started), "heartbeat" (seen), "stop" (delay: seconds until SIGTERM; grace: seconds until SIGKILL, by default the
host spec's; hold: schedulers and servers get SIGTERM only after "release", or at the end of the grace; processes:
names, all if absent; who: the requester), "release" (no worker of the job runs), "failing" (sent again and again while
a worker of any host handles the job's failure), "kill", "freeze" (stop all processes for a checkpoint), "keep" (number:
copy what they keep, and let them go on), "thaw" (let them go on), "upload" (number; publishes: this host will write the
record) and "publish" (number, hosts: write the record of what they have uploaded), "drop" (no record is to be written).

From the agent: "hello" (status: see status.py), "alive" (reply to a heartbeat), "replaced" (another control
machine took over). Messages with a number n are kept until acknowledged: "started" (process), "event" (process,
age, event), "restarted" (process, incarnation; how: its last life ended; count: restarts in 10 minutes, of at most
`limit`), "failure" (see core/root_cause.py), "ended" (process, status, asked: whether its end was requested),
"stopping" (who, grace: a requester other than the control machine stopped the job), "frozen" (problem, newest), "kept"
(problem: why not, "" if they are), "uploaded", "published" (number, done, problem), "done" (why: reason of the stop, ""
if all processes ended on their own; asked: the requester, if any; left: names of processes that could not be
terminated).
"""
