"""What a request to the fake asks for, and how an error is said in the protocol of its service."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from moto.core.parse import PROTOCOL_PARSERS
from moto.core.request import Request, determine_request_protocol
from moto.core.routing import get_service_router
from moto.core.utils import get_service_model
from werkzeug.wrappers import Response
from werkzeug.wsgi import get_input_stream

# the name in a signature -> the name of the service's model, where the two differ
MODELS = {"servicequotas": "service-quotas", "monitoring": "cloudwatch", "elasticloadbalancing": "elbv2"}
XML = "text/xml"


@dataclass(frozen=True)
class Call:
    """One request: `action` as boto3 spells operations (`CreateFleet`), `parameters` as boto3 takes them."""

    service: str
    action: str
    region: str
    parameters: dict[str, Any] = field(default_factory=dict)


def read(environ: dict[str, Any]) -> bytes:
    """The body of a request; it can be read again by whom the request is handed to."""
    body = get_input_stream(environ).read()
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(body), str(len(body))
    environ.pop("wsgi.input_terminated", None)
    return body


def understand(environ: dict[str, Any], body: bytes) -> Call:
    """What is asked for; a request that no model knows keeps its method and path as its action."""
    service, region = _signed_for(environ)
    request = Request({**environ, "wsgi.input": io.BytesIO(body)})
    try:
        model = get_service_model(MODELS.get(service, service))
        action, uri = _action(request, service)
        parsed = _parsed(model, action, request, uri)
    except Exception:  # noqa: BLE001  a foreign or malformed request is moto's to answer
        return Call(service, f"{request.method} {request.path}", region)
    return Call(service, action, region, parsed)


def _signed_for(environ: dict[str, Any]) -> tuple[str, str]:
    """Service and region of the signature; S3 where nothing is signed, as moto takes it."""
    scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split(",")[0].split("/")
    return (scope[3], scope[2]) if len(scope) == 5 else ("s3", "us-east-1")


def _action(request: Request, service: str) -> tuple[str, dict[str, Any]]:
    if target := request.headers.get("X-Amz-Target"):
        return target.rpartition(".")[2], {}
    if action := request.values.get("Action"):
        return action, {}
    operation, uri = get_service_router(MODELS.get(service, service)).match(request)
    return str(operation.name), uri


def _parsed(model: Any, action: str, request: Request, uri: dict[str, Any]) -> dict[str, Any]:
    parser = PROTOCOL_PARSERS[determine_request_protocol(model, request.content_type)](model.operation_model(action))
    return parser.parse(
        {
            "method": request.method,
            "values": request.values,
            "headers": request.headers,
            "body": request.data,
            "url_path": request.path,
            "url_params": uri,
        }
    )


def refusal(call: Call, code: str, message: str, status: int = 400) -> Response:
    """An error as the call's service says it."""
    protocol = get_service_model(MODELS.get(call.service, call.service)).metadata["protocol"]
    if "xml" not in protocol and protocol not in ("ec2", "query"):
        body = json.dumps({"__type": code, "message": message})
        return Response(body, status, {"x-amzn-ErrorType": code}, content_type="application/x-amz-json-1.1")
    error = f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
    if protocol == "ec2":
        body = f"<Response><Errors>{error}</Errors><RequestID>fake</RequestID></Response>"
    elif protocol == "query":
        body = f"<ErrorResponse>{error}<RequestId>fake</RequestId></ErrorResponse>"
    else:
        body = error
    return Response(body, status, content_type=XML)
