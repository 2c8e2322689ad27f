"""The plugin as the engine meets it: a servicer behind real gRPC, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc

from mgpu.errors import Conflict, ProviderError
from mgpu.iac import servicer
from mgpu.iac.handler import Handler
from mgpu.iac.wire import from_struct, to_struct
from mgpu.plan.model import Offer, Requirements
from mgpu.providers import registry
from mgpu.providers.base import (
    Capabilities,
    FleetRequest,
    FleetState,
    Handle,
    Intent,
    NodePhase,
    NodeState,
    Offers,
    Provider,
)

Properties = dict[str, object]


def urn(token: str, name: str = "it", stack: str = "dev", project: str = "mgpu") -> str:
    return f"urn:pulumi:{stack}::{project}::{token}::{name}"


class Wire:
    """Calls the plugin with plain data and answers with Pulumi's own messages."""

    def __init__(self, stub: provider_pb2_grpc.ResourceProviderStub) -> None:
        self.stub = stub

    def check(self, where: str, new: Properties, old: Properties | None = None) -> provider_pb2.CheckResponse:
        return self.stub.Check(provider_pb2.CheckRequest(urn=where, olds=to_struct(old or {}), news=to_struct(new)))

    def inputs(self, where: str, new: Properties, old: Properties | None = None) -> Properties:
        answer = self.check(where, new, old)
        assert not answer.failures, answer.failures
        return from_struct(answer.inputs)

    def create(self, where: str, inputs: Properties, preview: bool = False) -> provider_pb2.CreateResponse:
        return self.stub.Create(provider_pb2.CreateRequest(urn=where, properties=to_struct(inputs), preview=preview))

    def read(
        self, where: str, resource_id: str, old: Properties | None = None, inputs: Properties | None = None
    ) -> provider_pb2.ReadResponse:
        request = provider_pb2.ReadRequest(
            urn=where, id=resource_id, properties=to_struct(old or {}), inputs=to_struct(inputs or {})
        )
        return self.stub.Read(request)

    def diff(
        self, where: str, old_inputs: Properties, old: Properties, new: Properties, ignore: tuple[str, ...] = ()
    ) -> provider_pb2.DiffResponse:
        request = provider_pb2.DiffRequest(
            urn=where,
            id="x",
            old_inputs=to_struct(old_inputs),
            olds=to_struct(old),
            news=to_struct(new),
            ignoreChanges=ignore,
        )
        return self.stub.Diff(request)

    def update(
        self, where: str, resource_id: str, old: Properties, new: Properties, preview: bool = False
    ) -> Properties:
        request = provider_pb2.UpdateRequest(
            urn=where, id=resource_id, olds=to_struct(old), news=to_struct(new), preview=preview
        )
        return from_struct(self.stub.Update(request).properties)

    def delete(self, where: str, resource_id: str, old: Properties) -> None:
        self.stub.Delete(provider_pb2.DeleteRequest(urn=where, id=resource_id, properties=to_struct(old)))


Serve = Callable[[dict[str, Handler]], Wire]


@pytest.fixture
def serve(xdg: Path) -> Iterator[Serve]:
    """`serve({token: handler})`: a configured plugin with these resource types."""
    servers: list[grpc.Server] = []

    def start(handlers: dict[str, Handler]) -> Wire:
        server, port = servicer.serve(servicer.Servicer(handlers, "{}"))
        servers.append(server)
        stub = provider_pb2_grpc.ResourceProviderStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
        config = stub.CheckConfig(provider_pb2.CheckRequest(news=to_struct({}))).inputs
        stub.Configure(provider_pb2.ConfigureRequest(args=config))
        return Wire(stub)

    yield start
    for server in servers:
        server.stop(grace=None)


@pytest.fixture
def at() -> Callable[..., str]:
    """`at("mgpu:index:Fleet")`: a URN of this type."""
    return urn


class FakeProvider:
    """A provider with the contract's memory: gangs by token, machines by id. `refuse` is raised by the next calls."""

    name = "fake"
    caps = Capabilities(
        spot=True,
        multi_node=True,
        access=frozenset({"ssh"}),
        runtime="vm",
        labels="tags",
        idempotent_create=True,
        server_side_kill=False,
        interruption_notice_s=0,
    )

    def __init__(self) -> None:
        self.price = 0.05
        self.gangs: dict[str, tuple[FleetRequest, Handle]] = {}
        self.phases: dict[str, NodePhase] = {}
        self.created: list[str] = []
        self.on_create: Callable[[tuple[str, ...]], None] = lambda ids: None
        self.refuse_describe: ProviderError | None = None
        self.refuse_repair: ProviderError | None = None

    def check(self) -> None: ...

    def offers(self, requirements: Requirements) -> Offers:
        markets = ("spot", "on-demand")
        offers = tuple(
            Offer(
                provider="fake",
                instance_type="m1",
                market=market,
                price_usd_per_hour=self.price,
                region="r1",
                fetched_at=time.time(),
            )
            for market in markets
        )
        return Offers(offers=offers, source="a test")

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        return self._make(request, token, range(request.requirements.nodes), ("",) * request.requirements.nodes)

    def find(self, intent: Intent) -> Handle | None:
        return self.gangs[intent.token][1] if intent.token in self.gangs else None

    def describe(self, handle: Handle) -> FleetState:
        if self.refuse_describe:
            raise self.refuse_describe
        return FleetState(nodes=tuple(self._node(rank, name) for rank, name in enumerate(handle.ids)))

    def repair(
        self, handle: Handle, missing: tuple[int, ...], request: FleetRequest, offer: Offer, token: str
    ) -> Handle:
        if self.refuse_repair:
            raise self.refuse_repair
        self.destroy(handle, tuple(handle.ids[rank] for rank in missing))
        return self._make(request, token, missing, handle.ids)

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        return tuple(handle for request, handle in self.gangs.values() if request.owner == owner and self._left(handle))

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        for name in handle.ids if nodes is None else nodes:
            self.phases[name] = NodePhase.TERMINATED
        return True

    @property
    def running(self) -> set[str]:
        return {name for name, phase in self.phases.items() if phase is NodePhase.RUNNING}

    def _left(self, handle: Handle) -> bool:
        return any(self.phases.get(name) is not NodePhase.TERMINATED for name in handle.ids if name)

    def _make(self, request: FleetRequest, token: str, ranks: Iterable[int], ids: tuple[str, ...]) -> Handle:
        if token in self.gangs:
            known, handle = self.gangs[token]
            if known != request:
                raise Conflict("the token was used with other parameters", scope="offer")
            return handle
        fresh = {rank: f"{token[:6]}-{rank}" for rank in ranks}
        handle = Handle(
            provider="fake",
            region="r1",
            fleet=request.fleet,
            generation=request.generation,
            token=token,
            ids=tuple(fresh.get(rank, name) for rank, name in enumerate(ids)),
        )
        self.gangs[token] = request, handle
        self.created += fresh.values()
        self.phases |= dict.fromkeys(fresh.values(), NodePhase.RUNNING)
        self.on_create(tuple(fresh.values()))
        return handle

    def _node(self, rank: int, name: str) -> NodeState:
        phase = self.phases.get(name, NodePhase.TERMINATED)
        return NodeState(
            rank=rank,
            id=name,
            phase=phase,
            address="192.0.2.1",
            user="u",
            host_key=f"ssh-ed25519 {name}",
            price_usd_per_hour=self.price,
            hard_cap_at=time.time() + 3600,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeProvider:
    """A provider `fake`, known to the registry for this test."""
    provider = FakeProvider()
    real = registry.get

    def get(name: str, options: Mapping[str, str] | None = None) -> Provider:
        return provider if name == "fake" else real(name, options)

    monkeypatch.setattr(registry, "get", get)
    return provider
