"""Who may do what: roles' policies, for the scheduler's sake; and, where a test wants it, for every caller but root."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qs, urlsplit

from moto import settings
from moto.core.authorization import ActionAuthenticatorMixin
from moto.iam.access_control import AssumedRoleAccessKey, IAMRequest, IAMRequestBase, PermissionResult
from moto.iam.models import iam_backends
from moto.s3.models import FakeBucket
from moto.sts.models import sts_backends
from werkzeug import Request

from fakes.aws import simulation
from fakes.aws.cloud import Cloud
from fakes.aws.faults import ACCOUNT
from fakes.aws.metadata import lasting
from fakes.aws.patching import existing, replace

ROOT_KEY = "AKIAFAKEFAKEFAKEFAKE"  # fake.py; nothing is ever denied to it
PARTITION = "aws"
SESSION_S = 6 * 3600

Statement = dict[str, Any]

_heard = threading.local()


def heard(environ: Mapping[str, Any]) -> None:
    """This thread answers this request now: moto tells a bucket's policy too little of it."""
    request = Request(dict(environ))
    _heard.headers, _heard.path = request.headers, f"{request.path}?{request.query_string.decode()}"


def install(cloud: Cloud) -> None:
    """From now on `cloud.enforced` says whether callers need permissions."""
    authorize = existing(ActionAuthenticatorMixin, "_authenticate_and_authorize_action")

    def authorized(self: Any, *request: Any) -> None:
        if cloud.enforced and self.access_key != ROOT_KEY:
            authorize(self, *request)

    by_moto = existing(IAMRequestBase, "check_action_permitted")

    def judged(self: Any, resource: str) -> None:
        """Roles as AWS judges them: with conditions, a boundary and trust, none of which moto knows."""
        role = getattr(self._access_key, "_owner_role_name", None)
        if role is None or self._action == "sts:GetCallerIdentity":
            by_moto(self, resource)
        elif not _may(cloud, role, self, resource):
            self._raise_access_denied()

    replace(IAMRequestBase, "check_action_permitted", judged)
    replace(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    replace(ActionAuthenticatorMixin, "_authenticate_and_authorize_action", authorized)
    replace(FakeBucket, "get_permission", _bucket_says)
    replace(IAMRequest, "check_signature", lambda self: None)  # moto's own sum is wrong for a DELETE with a query
    simulation.install()


def _may(cloud: Cloud, role: str, request: Any, resource: str) -> bool:
    """Whether a session of this role may do what it asks for."""
    facts = _facts(request._headers, request._path, request._action)
    if request._action != "sts:AssumeRole":
        return allowed(_role(role), request._action, resource, facts)
    wanted, secret = _said(request._data, "RoleArn"), _said(request._data, "ExternalId")
    facts |= {"sts:ExternalId": secret} if secret else {}
    return allowed(_role(role), request._action, wanted, facts) and _takes_on(role, wanted, facts)


def _said(data: Mapping[str, Any], name: str) -> str:
    return str(next(iter(_many(data.get(name))), ""))


def _role(name: str) -> Any:
    return next((each for each in iam_backends[ACCOUNT][PARTITION].roles.values() if each.name == name), None)


def _takes_on(role: str, wanted: str, facts: Mapping[str, str]) -> bool:
    """Whether the wanted role trusts this one."""
    found = next((each for each in iam_backends[ACCOUNT][PARTITION].roles.values() if each.arn == wanted), None)
    return found is not None and any(
        each["Effect"] == "Allow"
        and _role(role).arn in _many(each.get("Principal", {}).get("AWS"))
        and _holds(each.get("Condition", {}), facts)
        for each in _statements(found.assume_role_policy_document)
    )


def _facts(headers: Mapping[str, str], path: str, action: str) -> dict[str, str]:
    """What a request to S3 says of itself, as condition keys. Plain HTTP of the fake stands for TLS."""
    facts = {"aws:SecureTransport": "true"}
    asked = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if "prefix" in asked:
        facts["s3:prefix"] = asked["prefix"][0]
    if action == "s3:PutObject":
        makes = "uploads" not in asked and "partNumber" not in asked  # a part of an upload is no object yet
        facts["s3:ObjectCreationOperation"] = str(makes).lower()
        if "If-None-Match" in headers:
            facts["s3:if-none-match"] = headers["If-None-Match"]
    return facts


def _bucket_says(bucket: FakeBucket, action: str, resource: str) -> PermissionResult:
    """What a bucket's policy says; moto's own reading knows no conditions, and would deny all for want of TLS."""
    facts = _facts(_heard.headers, _heard.path, action)
    said = [
        each["Effect"]
        for each in (_statements(bucket.policy.decode()) if bucket.policy else ())
        if covers(each, action, resource, facts)
    ]
    if "Deny" in said:
        return PermissionResult.DENIED
    return PermissionResult.PERMITTED if "Allow" in said else PermissionResult.NEUTRAL


def caller(access_key: str) -> Any:
    """moto's user or role whose key this is; None: root, who may do everything."""
    iam, sts = iam_backends[ACCOUNT][PARTITION], sts_backends[ACCOUNT][PARTITION]
    for user in iam.users.values():
        if any(key.access_key_id == access_key for key in user.access_keys):
            return user
    session = sts.get_assumed_role_from_access_key(access_key)
    return _role(session.role_arn.rpartition("/")[2]) if session else None


def trusts(role_arn: str, service: str) -> bool:
    """Whether there is such a role, and the service may take it on."""
    for role in iam_backends[ACCOUNT][PARTITION].roles.values():
        if role.arn == role_arn:
            return any(
                each["Effect"] == "Allow" and service in _many(each.get("Principal", {}).get("Service"))
                for each in _statements(role.assume_role_policy_document)
            )
    return False


def permits(role_arn: str, action: str, resource: str, facts: Mapping[str, str]) -> bool:
    """Whether the role's policies allow this, with what is known of request and resource as condition keys."""
    iam = iam_backends[ACCOUNT][PARTITION]
    role = next((each for each in iam.roles.values() if each.arn == role_arn), None)
    if role is None:
        return False
    return allowed(role, action, resource, facts)


def allowed(who: Any, action: str, resource: str, facts: Mapping[str, str]) -> bool:
    """Whether the policies of moto's role or user allow this, within what bounds it."""
    if who is None:
        return False
    attached = [_newest(policy) for policy in who.managed_policies.values()]
    bounds = []
    if arn := getattr(who, "permissions_boundary_arn", None):
        bounds = [[_newest(iam_backends[ACCOUNT][PARTITION].managed_policies[arn])]]
    return all(
        _say_yes(documents, action, resource, facts) for documents in [[*who.policies.values(), *attached], *bounds]
    )


def _newest(policy: Any) -> str:
    return next(version.document for version in policy.versions if version.is_default)


def _say_yes(documents: list[str], action: str, resource: str, facts: Mapping[str, str]) -> bool:
    said = [
        each["Effect"]
        for document in documents
        for each in _statements(document)
        if covers(each, action, resource, facts)
    ]
    return "Allow" in said and "Deny" not in said


def denied(statements: list[Statement], action: str, resource: str, facts: Mapping[str, str]) -> bool:
    """Whether one of these statements denies this."""
    return any(each["Effect"] == "Deny" and covers(each, action, resource, facts) for each in statements)


def covers(statement: Statement, action: str, resource: str, facts: Mapping[str, str]) -> bool:
    """Whether a statement is about this, whatever it then says."""
    return _about(statement, action, resource) and _holds(statement.get("Condition", {}), facts)


def _statements(document: str) -> list[Statement]:
    return _many(json.loads(document).get("Statement"))


def _many(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [] if given is None else [given]


def _about(statement: Statement, action: str, resource: str) -> bool:
    actions, resources = _many(statement.get("Action")), _many(statement.get("Resource"))
    named = any(fnmatchcase(action.lower(), pattern.lower()) for pattern in actions)
    return named and any(fnmatchcase(resource, pattern) for pattern in resources)


def _holds(conditions: Mapping[str, Mapping[str, Any]], facts: Mapping[str, str]) -> bool:
    """A condition that the fake cannot judge does not hold. A policy's variable is a fact, too: `${aws:userid}`."""
    variables = {f"${{{name}}}": value for name, value in facts.items()}
    checks = [(kind, facts.get(key), value) for kind, block in conditions.items() for key, value in block.items()]
    return all(
        _one_holds(kind, actual, [variables.get(str(each), str(each)) for each in _many(value)])
        for kind, actual, value in checks
    )


def _one_holds(kind: str, actual: str | None, wanted: list[str]) -> bool:
    if kind == "Null":
        return wanted == [str(actual is None).lower()]
    if kind.endswith("IfExists"):
        return actual is None or _one_holds(kind.removesuffix("IfExists"), actual, wanted)
    if kind in ("StringEquals", "ArnEquals", "Bool"):
        return actual in wanted
    if kind in ("StringLike", "ArnLike"):
        return actual is not None and any(fnmatchcase(actual, pattern) for pattern in wanted)
    return False


def credentials(machine: Any) -> Mapping[str, str]:
    """What the metadata service gives a machine: a session of its role, which policies are asked about."""
    arn = f"arn:aws:iam::{ACCOUNT}:role/{machine.role}"
    session = sts_backends[ACCOUNT][PARTITION].assume_role(machine.region, machine.id, arn, "", SESSION_S, "")
    secret = {"AccessKeyId": session.access_key_id, "SecretAccessKey": session.secret_access_key}
    return {"Code": "Success", "Type": "AWS-HMAC", **secret, "Token": session.session_token, **lasting(SESSION_S)}


existing(AssumedRoleAccessKey, "collect_policies")  # what moto looks role sessions up with
