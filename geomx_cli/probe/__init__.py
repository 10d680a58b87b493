"""The probe that doctor and launch run on each host during checks: `python -m geomx_cli.probe`.

    service.py      requests on stdin, responses on stdout
    facts.py        versions, folders, addresses, free ports, clock
    machine.py      memory, cores, GPUs
    interfaces.py   addresses of network interfaces
    ports.py        free ports, and the holders of others
    listeners.py    listens on the planned ports and answers diallers
    dialling.py     dials other hosts and classifies the results
    bandwidth.py    measures throughput of a connection

Standard library only, so that it starts in a few hundredths of a second and requires only geomx on the host.

Messages are JSON objects, one per line. A request has "id" (a number), "do" and its fields; the response has the same
"id" and either its fields or "error" (text). Requests are handled concurrently, so responses may be out of order. The
probe exits, and closes every socket, at the end of stdin or after a minute without a request.

    clock      -> clock (Unix seconds)
    facts      state_dir, workdir, temp, modules, distributions, binds, ports, gpus -> see facts.py
    listen     token, binds [[address, port, tcp or udp], ...] -> results [{"error", "in_use", "holder"}, ...]
    dial       targets [{"address", "port", "token", "source", "protocol"}, ...], limit -> results, see dialling.py
    measure    address, port, token, seconds, limit -> sent, received (bytes per second)
    release    closes all listeners -> closed (their number)
"""
