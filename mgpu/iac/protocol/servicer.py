"""The gRPC side of the plugin: decodes a request, hands it to the handler of its type, encodes the answer.

Written against Pulumi's provider protocol itself, not against the SDK's experimental classes, which hide what is needed
here: old inputs in `Diff`, partial failures, refresh before update, clean error texts. Calls run in a thread pool, so a
handler may block, and `Cancel` reaches the plugin meanwhile.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import empty_pb2
from pulumi.runtime.proto import engine_pb2, engine_pb2_grpc, plugin_pb2, provider_pb2, provider_pb2_grpc

from mgpu import __version__, paths
from mgpu.backend import location
from mgpu.backend.owner import owner
from mgpu.errors import MgpuError, of_this_machine
from mgpu.events import Event, ImageStep, LayerPushed, Note, OfferTried, Warned
from mgpu.iac import failures
from mgpu.iac.protocol.handler import Call, Difference, Handler, Settings
from mgpu.iac.protocol.wire import UNKNOWN, PartialFailure, from_struct, to_struct

_KIND = provider_pb2.PropertyDiff.Kind
_MESSAGE_BYTES = 400 * 1024 * 1024  # the engine's own limit
_THREADS = 16


def serve(servicer: Servicer) -> tuple[grpc.Server, int]:
    """A running server on a free port of the loopback interface."""
    limits = [("grpc.max_receive_message_length", _MESSAGE_BYTES), ("grpc.max_send_message_length", _MESSAGE_BYTES)]
    server = grpc.server(ThreadPoolExecutor(max_workers=_THREADS), options=limits)
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


def _answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turns what a handler raises into an answer that the engine shows as it is."""

    @functools.wraps(method)
    def answer(self: Servicer, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(self, request)
        except PartialFailure as partial:
            context.set_trailing_metadata((("grpc-status-details-bin", partial.to_status()),))
            context.abort(grpc.StatusCode.UNKNOWN, failures.describe(partial.cause))
        except MgpuError as error:
            context.abort(grpc.StatusCode.UNKNOWN, failures.describe(error))
        except Exception as bug:  # noqa: BLE001  a bug must reach the user as one, with its trace
            if (short := of_this_machine(bug)) is not None:
                context.abort(grpc.StatusCode.UNKNOWN, failures.describe(short))
            trace = "".join(traceback.format_exception(bug))
            context.abort(grpc.StatusCode.UNKNOWN, f"a bug in pulumi-resource-mgpu: {bug!r}\n{trace}")

    return answer


class Servicer(provider_pb2_grpc.ResourceProviderServicer):
    """Serves the handlers, by type token. `schema` makes the package's, as JSON, for the few who ask; `engine` is the
    address of the engine's own service ("" = no log there); `config`: what programs may configure for the types."""

    def __init__(
        self, handlers: Mapping[str, Handler], schema: Callable[[], str], engine: str = "", config: Sequence[str] = ()
    ) -> None:
        self._handlers, self._config = handlers, config
        self._schema = schema
        self._settings: Settings | None = None
        self._cancelled = threading.Event()
        self._engine = engine_pb2_grpc.EngineStub(grpc.insecure_channel(engine)) if engine else None

    # ---- the plugin itself

    @_answering
    def Handshake(self, _request: Any) -> provider_pb2.ProviderHandshakeResponse:
        return provider_pb2.ProviderHandshakeResponse(accept_secrets=False, accept_resources=False)

    @_answering
    def GetPluginInfo(self, _request: Any) -> plugin_pb2.PluginInfo:
        return plugin_pb2.PluginInfo(version=__version__)

    @_answering
    def GetSchema(self, _request: Any) -> provider_pb2.GetSchemaResponse:
        return provider_pb2.GetSchemaResponse(schema=self._schema())

    @_answering
    def Cancel(self, _request: Any) -> empty_pb2.Empty:
        # also sent at every normal end: it only says that nobody waits for what is under way
        self._cancelled.set()
        return empty_pb2.Empty()

    # ---- configuration

    @_answering
    def CheckConfig(self, request: provider_pb2.CheckRequest) -> provider_pb2.CheckResponse:
        old, new = from_struct(request.olds), from_struct(request.news)
        # what the user left out is fixed at the first `up`, and stays what it was then
        defaults = {"owner": owner(location.of_engine()), "stateDir": str(paths.state_dir())}
        inputs = {key: new.get(key) or old.get(key) or default for key, default in defaults.items()}
        inputs |= {key: new[key] for key in self._config if new.get(key)}  # the program's own, always
        unknown = [key for key in new if key not in (*defaults, *self._config, "version")]
        wrong = [provider_pb2.CheckFailure(property=key, reason="no such configuration") for key in unknown]
        return provider_pb2.CheckResponse(inputs=to_struct(inputs), failures=wrong)

    @_answering
    def DiffConfig(self, _request: Any) -> provider_pb2.DiffResponse:
        # other machines' owner tags and folders are in the resources' own state: nothing has to be replaced
        return provider_pb2.DiffResponse(changes=provider_pb2.DiffResponse.DIFF_UNKNOWN)

    @_answering
    def Configure(self, request: provider_pb2.ConfigureRequest) -> provider_pb2.ConfigureResponse:
        config, backend = from_struct(request.args), location.of_engine()
        known = config.get("stateDir") if backend.folder else None  # a bucket's stack was made by any machine
        self._settings = Settings(
            state_dir=Path(known or paths.state_dir()),
            owner=config.get("owner") or owner(backend),
            more={key: config[key] for key in self._config if config.get(key)},
        )
        return provider_pb2.ConfigureResponse(acceptSecrets=False, supportsPreview=True)

    # ---- resources

    @_answering
    def Check(self, request: provider_pb2.CheckRequest) -> provider_pb2.CheckResponse:
        old, new = from_struct(request.olds), from_struct(request.news)
        checked = self._handler(request.urn).check(self._call(request.urn), old, new)
        wrong = [provider_pb2.CheckFailure(property=key, reason=why) for key, why in checked.failures.items()]
        return provider_pb2.CheckResponse(inputs=to_struct(checked.inputs), failures=wrong)

    @_answering
    def Diff(self, request: provider_pb2.DiffRequest) -> provider_pb2.DiffResponse:
        old_inputs, old, new = from_struct(request.old_inputs), from_struct(request.olds), from_struct(request.news)
        ignored = {path.split(".")[0].split("[")[0] for path in request.ignoreChanges}
        new |= {key: old_inputs.get(key) for key in ignored}
        return _diff_response(self._handler(request.urn).diff(old_inputs, old, new), old_inputs, new)

    @_answering
    def Create(self, request: provider_pb2.CreateRequest) -> provider_pb2.CreateResponse:
        handler = self._handler(request.urn)
        call = self._call(request.urn, request.preview)
        resource_id, outputs = handler.create(call, from_struct(request.properties))
        return provider_pb2.CreateResponse(
            id="" if request.preview else resource_id,
            properties=to_struct(outputs, _known_secrets(handler, outputs)),
            refresh_before_update=handler.refresh_before_update,
        )

    @_answering
    def Read(self, request: provider_pb2.ReadRequest) -> provider_pb2.ReadResponse:
        handler = self._handler(request.urn)
        old, inputs = from_struct(request.properties), from_struct(request.inputs)
        found = handler.read(self._call(request.urn), request.id, old, inputs)
        if found is None:
            return provider_pb2.ReadResponse()
        return provider_pb2.ReadResponse(
            id=found.resource_id,
            properties=to_struct(found.outputs, _known_secrets(handler, found.outputs)),
            inputs=to_struct(found.inputs),
            refresh_before_update=handler.refresh_before_update,
        )

    @_answering
    def Update(self, request: provider_pb2.UpdateRequest) -> provider_pb2.UpdateResponse:
        handler = self._handler(request.urn)
        call = self._call(request.urn, request.preview)
        outputs = handler.update(call, request.id, from_struct(request.olds), from_struct(request.news))
        return provider_pb2.UpdateResponse(
            properties=to_struct(outputs, _known_secrets(handler, outputs)),
            refresh_before_update=handler.refresh_before_update,
        )

    @_answering
    def Delete(self, request: provider_pb2.DeleteRequest) -> empty_pb2.Empty:
        self._handler(request.urn).delete(self._call(request.urn), request.id, from_struct(request.properties))
        return empty_pb2.Empty()

    # ---- helpers

    def _handler(self, urn: str) -> Handler:
        # a resource with a parent carries its parent's type too: `parent$type`
        token = urn.split("::")[2].rpartition("$")[2]
        if token not in self._handlers:
            raise MgpuError(f"this version of pulumi-resource-mgpu has no resource type {token}")
        return self._handlers[token]

    def _call(self, urn: str, preview: bool = False) -> Call:
        if self._settings is None:
            raise MgpuError("the engine used the provider before it configured it")
        return Call(urn, self._settings, functools.partial(self._log, urn), self._cancelled, preview)

    def _log(self, urn: str, event: Event) -> None:
        """Shows an event beside the resource, live; warnings stay, the rest is replaced by the next one."""
        text = _text(event)
        if self._engine is None or not text:
            return
        warning = isinstance(event, Warned)
        severity = engine_pb2.WARNING if warning else engine_pb2.INFO
        request = engine_pb2.LogRequest(severity=severity, message=text, urn=urn, ephemeral=not warning)
        try:
            self._engine.Log(request, timeout=5)
        except grpc.RpcError:
            pass  # progress is a courtesy: an engine that is busy or gone must not fail a create


def _text(event: Event) -> str:
    match event:
        case OfferTried(offer, refusal):
            return f"{offer}: {refusal or 'granted'}"
        case ImageStep(step, steps, text):
            return f"step {step} of {steps}: {text}" if steps else text
        case LayerPushed(layer, "pushing", done, total):
            return f"layer {layer}: {min(100 * done // total, 100)} %" if total else ""
        case LayerPushed(layer, "pushed", _, _):
            return f"layer {layer}: pushed"
        case Note(text) | Warned(text):
            return text
        case _:
            return ""


def _known_secrets(handler: Handler, outputs: Mapping[str, Any]) -> set[str]:
    return {key for key in handler.secret if outputs.get(key) not in (None, UNKNOWN)}


def _diff_response(diff: Difference, old: Mapping[str, Any], new: Mapping[str, Any]) -> provider_pb2.DiffResponse:
    keys = (*diff.updates, *diff.replaces)
    return provider_pb2.DiffResponse(
        changes=provider_pb2.DiffResponse.DIFF_SOME if keys else provider_pb2.DiffResponse.DIFF_NONE,
        replaces=diff.replaces,
        diffs=keys,
        deleteBeforeReplace=diff.delete_first,
        detailedDiff={key: _property_diff(key, key in diff.replaces, old, new) for key in keys},
        hasDetailedDiff=True,
    )


def _property_diff(
    key: str, replaces: bool, old: Mapping[str, Any], new: Mapping[str, Any]
) -> provider_pb2.PropertyDiff:
    was, will = old.get(key), new.get(key)
    is_input = not (was is None and will is None)  # else it is an output that has drifted
    name = "UPDATE" if (was is None) == (will is None) else "ADD" if was is None else "DELETE"
    return provider_pb2.PropertyDiff(kind=_KIND.Value(f"{name}_REPLACE" if replaces else name), inputDiff=is_input)
