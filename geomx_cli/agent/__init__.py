"""Per-host supervisor of one job: `python -m geomx_cli.agent run DIRECTORY`.

The supervisor (supervisor.py) is the main loop. beginning.py, stopping.py, group_restarts.py and checkpoints.py do its
larger tasks. A Child (child.py) is one process of the job, and an Incarnation (incarnation.py) is one life of it.
succession.py starts the next agent if one was killed. relay.py connects the control machine with the agent's socket.
Other modules run on the host for commands: streams.py for `geomx logs collect` and `fetch`, tail.py for `logs`, stop.py
for `stop`, and prune.py for `jobs prune`.

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
