"""IAM's SimulatePrincipalPolicy, which moto lacks: policies of a user or a role, read with the facts that are given."""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult
from moto.iam.models import iam_backends
from moto.iam.responses import IamResponse

from fakes.aws.faults import ACCOUNT
from fakes.aws.patching import add


def install() -> None:
    """From now on IAM answers it."""

    def simulate_principal_policy(self: Any) -> ActionResult:
        from fakes.aws.permissions import allowed

        who = _principal(self._get_param("PolicySourceArn"))
        facts = {
            each["ContextKeyName"]: each["ContextKeyValues"][0] for each in self._get_param("ContextEntries") or []
        }
        resources = self._get_param("ResourceArns") or ["*"]
        results = [
            {
                "EvalActionName": action,
                "EvalResourceName": "*",
                "EvalDecision": "allowed"
                if who is None or all(allowed(who, action, resource, facts) for resource in resources)
                else "implicitDeny",
            }
            for action in self._get_param("ActionNames")
        ]
        return ActionResult({"EvaluationResults": results, "IsTruncated": False})

    add(IamResponse, "simulate_principal_policy", simulate_principal_policy)


def _principal(arn: str) -> Any:
    """moto's user or role; None: the user that moto takes the root key's owner for, who may do everything."""
    if arn.endswith(":user/moto"):
        return None
    iam = iam_backends[ACCOUNT]["aws"]
    name = arn.rpartition("/")[2]
    if ":user/" in arn:
        return iam.get_user(name)
    return iam.get_role(name)
