"""The plugin as the engine meets it: a servicer behind real gRPC, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc

from mgpu.iac import servicer
from mgpu.iac.handler import Handler
from mgpu.iac.wire import from_struct, to_struct

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
