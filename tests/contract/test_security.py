"""Keys of a job: those of CurveZMQ, made without it."""

import json

import zmq
import zmq.utils.z85

from geomx_cli.contract.security import Identity, generate


def test_keys_are_what_zeromq_would_make() -> None:
    worker = Identity("A/worker:0", "worker", 0)
    files = generate("job", {"server": {"A/worker:0": worker}, "A/worker:0": None})
    server, client = (json.loads(files[name]) for name in ("server", "A/worker:0"))
    for public, private in (
        (server["public"], server["private"]),
        (client["public"], client["private"]),
        (server["server_public"], server["server_secret"]),
    ):
        assert zmq.curve_public(private.encode()).decode() == public
        assert len(zmq.utils.z85.decode(private.encode())) == 32
    assert len({server["private"], client["private"], server["server_secret"]}) == 3
    assert server["allowed"] == {client["public"]: list(worker)} and client["server_secret"] == ""
