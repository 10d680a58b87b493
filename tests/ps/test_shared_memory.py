"""Payloads in shared memory arrive unchanged, and blocks are freed once unused."""

import os
import random
import threading
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from rounds import SCRIPT

from geomx_cli.ps.net import memory
from geomx_cli.ps.net.memory import FIRST, PLACE, SIZE, Arena, LinkMemory, PeerArena
from geomx_cli.ps.net.wire import BadMessage

ANNE, BOB = "anne", "bob"
WITHOUT = {
    "": "", "none": "os.memfd_create = None", "little": "memory.SIZE = 3 << 20",
    "foreign": "os.getpid = lambda: 1 << 22",
}  # fmt: skip


HOOK = """
import os
from pathlib import Path
from geomx_cli.ps.net import memory
put = memory.Arena.put
def noted(arena, *args, **named):
    place = put(arena, *args, **named)
    (Path(__file__).parent / ("no room" if place is None else "lent")).touch()
    return place
memory.Arena.put = noted
"""
"""Leaves a file that says whether payloads were lent, or found no room."""


@pytest.fixture
def arena() -> Arena:
    return Arena()


def mapped(arena: Arena, on_free: Any = lambda: None) -> PeerArena:
    return PeerArena(arena.offer(), on_free)


def put(arena: Arena, array: Any, peer: str = ANNE, *, lasting: bool = False) -> bytes:
    place = arena.put(peer, memoryview(array).cast("B"), lasting=lasting)
    assert place is not None
    return place


def test_what_is_read_is_what_was_put_and_cannot_be_written(arena: Arena) -> None:
    peer, chance = mapped(arena), random.Random(1)
    given = [np.random.default_rng(index).standard_normal(chance.randint(1, 300_000)) for index in range(20)]
    views = [peer.view(put(arena, array)) for array in given]
    for array, view in zip(given, views, strict=True):
        array_there = np.frombuffer(view)
        np.testing.assert_array_equal(array_there, array)
        assert view.readonly and not array_there.flags.writeable


def test_a_block_is_free_when_nothing_refers_to_it(arena: Arena) -> None:
    told: list[int] = []
    peer = mapped(arena, lambda: told.append(1))
    view = peer.view(put(arena, np.arange(50_000.0)))
    part = np.frombuffer(view)[10:20]
    del view
    assert peer.freed() == [] and part.sum() == 145
    del part
    freed = peer.freed()
    assert told == [1] and len(freed) == 1 and peer.freed() == [] and arena.used > 400_000
    arena.freed(ANNE, freed)
    assert arena.used == 0


def test_a_lasting_payload_is_copied_once_and_held_until_all_have_freed_it(arena: Arena) -> None:
    peer, value = mapped(arena), np.arange(50_000.0)
    places = [put(arena, value, who, lasting=True) for who in (ANNE, BOB, ANNE)]
    assert len(set(places)) == 1
    offset = PLACE.unpack(places[0])[0]
    arena.freed(BOB, [offset])
    arena.freed(ANNE, [offset])
    assert np.frombuffer(peer.view(places[0]))[7] == 7 and arena.used
    arena.freed(ANNE, [offset])
    assert not arena.used
    value = value + 1
    assert np.frombuffer(peer.view(put(arena, value, lasting=True)))[7] == 8


def test_what_changes_is_copied_each_time(arena: Arena) -> None:
    peer, value = mapped(arena), np.zeros(50_000)
    first = put(arena, value)
    value += 1
    second = put(arena, value)
    assert first != second
    assert not np.frombuffer(peer.view(first)).any() and np.frombuffer(peer.view(second)).all()


def test_without_room_there_is_no_place(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SIZE", FIRST + 2**20)
    payload = memoryview(bytes(2**19))
    places = [arena.put(ANNE, payload, lasting=False) for _ in range(3)]
    assert places[2] is None and places[0] is not None
    arena.freed(ANNE, [PLACE.unpack(places[0])[0]])
    assert arena.put(ANNE, payload, lasting=False) == places[0]


@pytest.mark.parametrize(
    "place",
    [b"", b"x" * 15, PLACE.pack(0, 100), PLACE.pack(FIRST, 0), PLACE.pack(SIZE - 8, 9), PLACE.pack(2**63, 2**63)],
)
def test_a_place_outside_is_refused(arena: Arena, place: bytes) -> None:
    with pytest.raises(BadMessage):
        mapped(arena).view(place)


def test_a_peer_that_is_gone_holds_nothing(arena: Arena) -> None:
    value = np.zeros(50_000)
    for who in (ANNE, BOB):
        put(arena, value, who, lasting=True)
        put(arena, value, who)
    arena.forget(ANNE)
    assert arena.used
    arena.forget(BOB)
    arena.forget(BOB)
    assert not arena.used


def test_a_peer_that_has_left_may_still_free_blocks_that_others_have(arena: Arena) -> None:
    payload = memoryview(np.zeros(50_000)).cast("B")
    anne, bob = (LinkMemory(lambda: arena, lambda _, __: None, lambda: None) for _ in (ANNE, BOB))
    for peer in (anne, bob):
        assert not peer.on_mapped() and peer.lend(payload, lasting=False) is None, "nothing was offered"
        peer.offer()
        assert peer.on_mapped()
    place = anne.lend(payload, lasting=False)
    anne.release()
    assert place is not None and bob.lend(payload, lasting=False) == place
    block = PLACE.unpack(place)[0]
    anne.on_freed({"blocks": [block]})
    assert anne.lend(payload, lasting=False) is None
    bob.on_freed({"blocks": [block]})
    with pytest.raises(BadMessage, match="does not have it"):
        bob.on_freed({"blocks": [block]})


@pytest.mark.parametrize("blocks", [None, "x", [FIRST + 1], [-1], ["x"], [[]], [None]])
def test_blocks_that_were_not_lent_cannot_be_freed(arena: Arena, blocks: Any) -> None:
    put(arena, np.zeros(50_000))
    with pytest.raises(BadMessage):
        arena.freed(ANNE, blocks)
    with pytest.raises(BadMessage):
        arena.freed(BOB, [FIRST])
    assert arena.used


def test_only_a_sealed_arena_of_this_account_is_mapped(arena: Arena, tmp_path: Any) -> None:
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, SIZE)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, SIZE)
    offer = arena.offer()
    wrong: list[dict[str, Any]] = [
        {}, {**offer, "token": b"x" * 16}, {**offer, "pid": "self"}, {**offer, "pid": 2**40}, {**offer, "file": -1},
        {**offer, "file": plain}, {**offer, "file": loose}, {**offer, "file": 2**30},
    ]  # fmt: skip
    for one in wrong:
        with pytest.raises((BadMessage, OSError)):
            PeerArena(one, lambda: None)
    os.close(plain)
    os.close(loose)


def test_any_thread_may_drop_the_last_reference(arena: Arena) -> None:
    peer = mapped(arena)
    for _ in range(50):
        views = [peer.view(put(arena, np.zeros(20_000))) for _ in range(8)]
        threads = [threading.Thread(target=views.pop) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        arena.freed(ANNE, peer.freed())
    assert not arena.used


@pytest.mark.processes
@pytest.mark.parametrize("room", ["", "none", "little", "foreign"])
def test_a_job_on_one_host_has_the_same_results_with_and_without_it(cluster: Cluster, room: str) -> None:
    """If there is no room, or the memory cannot be mapped, all payloads are sent through the sockets."""
    hook = cluster.directory / "sitecustomize.py"
    hook.write_text(HOOK + WITHOUT[room])
    cluster.environment = {
        "OUT": str(cluster.directory / "w{rank}.npz"), "ROUNDS": "6", "SIZES": "300000,10", "SHUFFLE": "3",
    }  # fmt: skip
    options = {"parties": 2, "workers": 2}
    cluster.launch_planned(cluster.planned(SCRIPT[1:], options, env={"PYTHONPATH": str(cluster.directory)}))
    cluster.finish()
    found = {path.name for path in cluster.directory.iterdir()} & {"lent", "no room"}
    assert found == {"": {"lent"}, "little": {"lent", "no room"}}.get(room, set())
    wanted = [
        sum(np.random.default_rng([rank, 5, index]).standard_normal(size).astype(np.float32) for rank in range(4))
        for index, size in enumerate((300_000, 10))
    ]
    for rank in range(4):
        for got, want in zip(np.load(cluster.directory / f"w{rank}.npz").values(), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
