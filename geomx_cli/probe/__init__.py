"""The checker that doctor and launch run on each host for a moment: `python -m geomx_cli.probe`.

    service.py      requests on standard input, answers on standard output
    facts.py        what only the host knows: versions, folders, addresses, free ports, clock
    machine.py      memory, cores, GPUs
    interfaces.py   the addresses of each network interface
    ports.py        which ports are free, and who holds one that is not
    listeners.py    listens where the job's processes will, and answers whoever dials
    dialling.py     dials other hosts, and says how that ended
    bandwidth.py    how fast bytes come through a connection

Standard library only, so that it starts in a few hundredths of a second and needs nothing but geomx on the host.
Messages are JSON objects, one a line. A request has "id" (a number), "do" and its fields; its answer has the same
"id" and either its fields or "error" (words). Requests run side by side, so answers may overtake each other. It
ends, and closes every socket, when its standard input ends or nothing has come for a minute.

    clock      -> clock (Unix seconds)
    facts      state_dir, workdir, temp, modules, distributions, binds, ports, gpus -> see facts.py
    listen     token, binds [[address, port], ...] -> results [{"error", "in_use", "holder"}, ...]
    dial       targets [{"address", "port", "token", "source"}, ...], limit -> results, see dialling.py
    measure    address, port, token, seconds, limit -> sent, received (bytes a second)
    release    closes all listeners -> closed (how many there were)
"""
