"""A server: members below and, optionally, roots above. Without an upstream it is a root itself.

    flat      root:          members are the workers
    central   local server:  members are its party's workers, upstream are the roots
              root:          members are the local servers, the master worker and the central party's workers
    spread    as central, with a root in each party

One loop handles one message at a time. A server ends when all members have said farewell.
"""

from functools import partial
from typing import Any

from geomx_cli.errors import GeomxError, InvalidSettings
from geomx_cli.events import EventLog
from geomx_cli.ps import optimizers
from geomx_cli.ps.algorithm import ServerPart
from geomx_cli.ps.barrier import Barrier
from geomx_cli.ps.config import NodeSettings
from geomx_cli.ps.link import Link
from geomx_cli.ps.members import Members
from geomx_cli.ps.membership import Membership
from geomx_cli.ps.node import Node, Request
from geomx_cli.ps.partition import Partition, Tensor
from geomx_cli.ps.rounds import STALL, Rounds
from geomx_cli.ps.uplink import Delivery, Uplink
from geomx_cli.ps.wire import BadMessage, Header, Kind

__all__ = ["Server"]


class Server:
    """One server process; `run` returns when the job has ended well and raises GeomxError when it has not."""

    def __init__(self, settings: NodeSettings, events: EventLog, algorithm: ServerPart, delivery: Delivery) -> None:
        self._settings = settings
        self._is_root = settings.role == "global_server" or settings.upper is None
        self._members = Members(settings, self._is_root)
        self._waiting: list[Request] = []
        self._optimizer_by = ""
        self._partition: Partition | None = None
        self._placements: dict[str, dict[str, Any]] = {}
        self.node = Node(settings, events, on_tensor=self._on_tensor, on_request=self._on_request, on_link=self._arrive)
        self._uplink = None if self._is_root else Uplink(delivery)
        self.rounds = Rounds(
            algorithm=algorithm,
            delivery=delivery,
            uplink=self._uplink,
            own_rank=lambda: self._party_index,
            owing=self._members.owing,
            links_of=self._members.links,
        )
        self._barriers = {"party": Barrier(self._members.of_own_plane), "all": Barrier(self._members.training)}
        self._party_index = 0
        self._endpoints = self.node.listen(settings.local)
        self._join()

    def run(self) -> None:
        """Serve until all members have said farewell."""
        self.node.loop.every(STALL, self.rounds.unstall)
        self.node.loop.every(self._settings.number("heartbeat"), self._report)
        try:
            self.node.run()
        finally:
            self.node.close()

    # Joining.

    def _join(self) -> None:
        settings, local, upper = self._settings, self._settings.local, self._settings.upper
        assert local is not None
        endpoints = list(self._endpoints)
        if upper is None:
            self.node.join(local, "server", lambda _: self._joined(), rank=settings.rank, endpoints=endpoints)
        elif self._is_root:
            self.node.join(upper, "server", self._join_central_plane, rank=settings.rank, endpoints=endpoints)
        else:
            self.node.join(local, "server", self._join_global_plane, rank=settings.rank, endpoints=endpoints)
            if local.servers == 1 or settings.rank is not None:
                self._join_upper(settings.rank or 0)

    def _join_central_plane(self, membership: Membership) -> None:
        assert self._settings.local is not None
        rank, endpoints = membership.rank, list(self._endpoints)
        self.node.join(self._settings.local, "server", lambda _: self._joined(), rank=rank, endpoints=endpoints)

    def _join_global_plane(self, membership: Membership) -> None:
        if len(self.node.memberships) == 1:
            self._join_upper(membership.rank)

    def _join_upper(self, own_rank: int) -> None:
        settings = self._settings
        assert settings.local is not None and settings.upper is not None
        rank = None
        if settings.party_index is not None:
            rank = settings.party_index * settings.local.servers + own_rank
        group = f"{settings.local.uri}:{settings.local.port}"
        self.node.join(settings.upper, "worker", self._dial_roots, rank=rank, group=group, wide_area=True)

    def _dial_roots(self, membership: Membership) -> None:
        settings, uplink = self._settings, self._uplink
        assert uplink is not None and settings.local is not None
        self._party_index = membership.rank // settings.local.servers
        for member in membership.servers():
            link = self.node.transport.dial(
                member.endpoint_for(settings.host), member.process, wide_area=member.party != settings.party,
                plane="global", rank=self._party_index, workers=settings.local.workers,
            )  # fmt: skip
            uplink.links.append(link)
        self._joined()

    def _joined(self) -> None:
        self.node.telemetry["state"] = "serving"
        self._serve_waiting()

    # Members.

    def _arrive(self, link: Link) -> None:
        self._members.arrive(link)
        self._serve_waiting()

    def _leave(self, link: Link) -> None:
        self._members.leave(link)
        self.rounds.members_changed()
        self._release_barriers()
        if self._uplink is not None and not self._members.owing():
            for root in self._uplink.links:
                root.control("leave")

    def _farewell(self, link: Link) -> None:
        if self._members.farewell(link):
            for root in self._uplink.links if self._uplink is not None else ():
                root.control("bye")
            for membership in self.node.memberships:
                membership.farewell()
            self.node.telemetry["state"] = "finished"
            self.node.loop.stop()

    # Tensors.

    def _on_tensor(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if header.kind == Kind.RESULT:
            if self._uplink is None:
                raise BadMessage("a result for a root")
            self._uplink.on_result(link, header, payload)
            return
        rank = self._members.rank_of(link)
        if header.kind == Kind.EXCHANGE:
            if header.contributors not in ((), (rank,)):
                raise BadMessage(f"contributions of ranks {header.contributors} from rank {rank}")
            self.rounds.on_exchange(link, header, payload, (rank,) if self._members.owes(rank) else ())
        elif header.kind == Kind.PULL:
            self.rounds.on_pull(link, header)
        else:
            self.rounds.on_push(link, header, payload)

    # Requests.

    def _on_request(self, request: Request) -> None:
        self._members.rank_of(request.link)
        if request.topic == "leave":
            self._leave(request.link)
        elif request.topic == "bye":
            self._farewell(request.link)
        elif not self._members.complete or (self._uplink is not None and not self._uplink.links):
            self._waiting.append(request)
        else:
            self._answer(request)

    def _serve_waiting(self) -> None:
        if self._members.complete and (self._uplink is None or self._uplink.links):
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._answer(request)
            self.rounds.members_changed()

    def _answer(self, request: Request) -> None:
        try:
            match request.topic:
                case "cluster":
                    self._on_cluster(request)
                case "declare":
                    self._on_declare(request)
                case "optimizer":
                    self._on_optimizer(request)
                case "barrier":
                    self._on_barrier(request)
                case topic if self._uplink is not None:
                    self._relay(request, topic)
                case topic:
                    raise InvalidSettings(f"nobody answers {topic!r}")
        except GeomxError as error:
            request.refuse(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadMessage(f"{request.topic}: {error!r}") from None

    def _relay(self, request: Request, topic: str) -> None:
        assert self._uplink is not None
        self.node.request(self._uplink.links[0], topic, request.body, request.answer, request.refuse)

    def _on_cluster(self, request: Request) -> None:
        """Who takes part in the job: answered by the rank-0 root, completed by the local server."""
        if self._uplink is not None:

            def complete(body: dict[str, Any]) -> None:
                request.answer({**body, "party_index": self._party_index, "root": False, "trains": True})

            self.node.request(self._uplink.links[0], "cluster", {}, complete, request.refuse)
            return
        request.answer(
            {
                "workers": self._members.workers_by_party(),
                "central": self._members.central_workers(),
                "root": True,
                "flat": self._settings.upper is None,
                "trains": self._members.owes(self._members.rank_of(request.link)),
                "party_index": -1,
            }
        )

    def _on_declare(self, request: Request) -> None:
        tensors = [Tensor(str(n), int(size), str(dtype)) for n, size, dtype in request.body["tensors"]]
        if self._uplink is None:
            self._partition = self._partition or self._new_partition(self._plane_of_roots())
            placed = [self._partition.declare(tensor) for tensor in tensors]
            answer = [
                [item.key, [[s.offset, s.length, s.root, s.server] for s in item.slices]] for item in placed
            ]
            request.answer({"placements": answer})
            return
        self.node.request(
            self._uplink.links[0], "declare", request.body,
            lambda body: self._assign_to_party(request, tensors, body), request.refuse,
        )  # fmt: skip

    def _assign_to_party(self, request: Request, tensors: list[Tensor], body: dict[str, Any]) -> None:
        """Spread the slices over the local servers of this party, and remember how."""
        assert self._settings.local is not None
        self._partition = self._partition or self._new_partition(self._settings.local.servers)
        answer = []
        for tensor, (key, slices) in zip(tensors, body["placements"], strict=True):
            if tensor.name not in self._placements:
                servers = self._partition.assign([length for _, length, _, _ in slices])
                placed = [[o, n, root, own] for (o, n, root, _), own in zip(slices, servers, strict=True)]
                self._placements[tensor.name] = {"placement": [key, placed]}
            answer.append(self._placements[tensor.name]["placement"])
        request.answer({"placements": answer})

    def _new_partition(self, servers: int) -> Partition:
        return Partition(int(self._settings.number("slice_elements")), servers)

    def _plane_of_roots(self) -> int:
        plane = self._settings.upper or self._settings.local
        assert plane is not None
        return plane.servers

    def _on_optimizer(self, request: Request) -> None:
        """Set the optimizer. The same again changes nothing; another one is only taken from who set the first."""
        if self._uplink is not None:
            self._relay_to_all(request)
            return
        name, params = str(request.body["name"]), dict(request.body["params"])
        new = optimizers.create(name, params)
        current, by = self.rounds.optimizer, str(request.body["by"])
        if current is None or self._optimizer_by == by:
            self.rounds.optimizer, self._optimizer_by = new, by
        elif (current.name, current.params) != (new.name, new.params):
            raise InvalidSettings(
                f"{by} asks for the optimizer {name} {params}, but {self._optimizer_by} has set"
                f" {current.name} {dict(current.params)}",
                "all workers that call set_optimizer must ask for the same one",
            )
        self.rounds.members_changed()
        request.answer()

    def _relay_to_all(self, request: Request) -> None:
        assert self._uplink is not None
        missing = set(range(len(self._uplink.links)))
        errors: list[GeomxError] = []

        def answered(index: int, _: dict[str, Any]) -> None:
            missing.discard(index)
            if not missing:
                request.refuse(errors[0]) if errors else request.answer()

        def failed(index: int, error: GeomxError) -> None:
            errors.append(error)
            answered(index, {})

        for index, link in enumerate(self._uplink.links):
            self.node.request(link, request.topic, request.body, partial(answered, index), partial(failed, index))

    def _on_barrier(self, request: Request) -> None:
        self._barriers[str(request.body["scope"])].ask(self._members.rank_of(request.link), request)
        self._release_barriers()

    def _release_barriers(self) -> None:
        for scope, barrier in self._barriers.items():
            while released := barrier.release():
                if scope == "party" or self._uplink is None:
                    for request in released:
                        request.answer()
                else:
                    self._barrier_above(released)

    def _barrier_above(self, released: list[Request]) -> None:
        """The party has met; now the parties meet."""
        assert self._uplink is not None

        def answer(body: dict[str, Any]) -> None:
            for request in released:
                request.answer()

        def refuse(error: GeomxError) -> None:
            for request in released:
                request.refuse(error)

        limit = self._settings.number("patience")
        self.node.request(self._uplink.links[0], "barrier", {"scope": "all"}, answer, refuse, limit)

    def _report(self) -> None:
        self.node.telemetry["round"] = self.rounds.last_round
