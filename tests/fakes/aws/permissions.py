"""Who may do what: roles' policies, for the scheduler's sake; and, where a test wants it, for every caller but root."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from moto import settings
from moto.core.authorization import ActionAuthenticatorMixin
from moto.iam.access_control import AssumedRoleAccessKey, IAMRequest, PermissionResult
from moto.iam.models import iam_backends
from moto.s3.models import FakeBucket
from moto.sts.models import sts_backends

from fakes.aws import simulation
from fakes.aws.cloud import Cloud
from fakes.aws.faults import ACCOUNT
from fakes.aws.metadata import lasting
from fakes.aws.patching import existing, replace

ROOT_KEY = "AKIAFAKEFAKEFAKEFAKE"  # fake.py; nothing is ever denied to it
PARTITION = "aws"
SESSION_S = 6 * 3600

Statement = dict[str, Any]


def install(cloud: Cloud) -> None:
    """From now on `cloud.enforced` says whether callers need permissions."""
    authorize = existing(ActionAuthenticatorMixin, "_authenticate_and_authorize_action")

    def authorized(self: Any, *request: Any) -> None:
        if cloud.enforced and self.access_key != ROOT_KEY:
            authorize(self, *request)

    replace(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    replace(ActionAuthenticatorMixin, "_authenticate_and_authorize_action", authorized)
    replace(FakeBucket, "get_permission", _bucket_says)
    replace(IAMRequest, "check_signature", lambda self: None)  # moto's own sum is wrong for a DELETE with a query
    simulation.install()


def _bucket_says(bucket: FakeBucket, action: str, resource: str) -> PermissionResult:
    """What a bucket's policy says; moto's own reading knows no conditions, and would deny all for want of TLS."""
    facts = {"aws:SecureTransport": "true"}  # the fake's plain HTTP stands for what AWS has
    said = [
        each["Effect"]
        for each in (_statements(bucket.policy.decode()) if bucket.policy else ())
        if _about(each, action, resource) and _holds(each.get("Condition", {}), facts)
    ]
    if "Deny" in said:
        return PermissionResult.DENIED
    return PermissionResult.PERMITTED if "Allow" in said else PermissionResult.NEUTRAL


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
    """Whether the policies of moto's role or user allow this."""
    versions = [version for policy in who.managed_policies.values() for version in policy.versions]
    attached = [version.document for version in versions if version.is_default]
    inline = who.policies.values()
    said = [
        each["Effect"]
        for document in [*inline, *attached]
        for each in _statements(document)
        if _about(each, action, resource) and _holds(each.get("Condition", {}), facts)
    ]
    return "Allow" in said and "Deny" not in said


def denied(statements: list[Statement], action: str, resource: str, facts: Mapping[str, str]) -> bool:
    """Whether one of these statements denies this."""
    return any(
        each["Effect"] == "Deny" and _about(each, action, resource) and _holds(each.get("Condition", {}), facts)
        for each in statements
    )


def _statements(document: str) -> list[Statement]:
    return _many(json.loads(document).get("Statement"))


def _many(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [] if given is None else [given]


def _about(statement: Statement, action: str, resource: str) -> bool:
    actions, resources = _many(statement.get("Action")), _many(statement.get("Resource"))
    named = any(fnmatchcase(action.lower(), pattern.lower()) for pattern in actions)
    return named and any(fnmatchcase(resource, pattern) for pattern in resources)


def _holds(conditions: Mapping[str, Mapping[str, Any]], facts: Mapping[str, str]) -> bool:
    """A condition that the fake cannot judge does not hold."""
    checks = [(kind, facts.get(key), value) for kind, block in conditions.items() for key, value in block.items()]
    return all(_one_holds(kind, actual, [str(each) for each in _many(value)]) for kind, actual, value in checks)


def _one_holds(kind: str, actual: str | None, wanted: list[str]) -> bool:
    if kind == "Null":
        return wanted == [str(actual is None).lower()]
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
