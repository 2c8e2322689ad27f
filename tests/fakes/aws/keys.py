"""What disks are encrypted with: AWS's own key, or one of the customer's, whose policy has to let EC2 use it.

Where the policy hands the judgement on to IAM, as the one of a new key does, nobody here has been given the right
there: neither mgpu's operator nor the role by which EC2 itself starts spot machines.
"""

from __future__ import annotations

import json
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response
from moto.kms.models import kms_backends

from fakes.aws import permissions
from fakes.aws.patching import add

OWN = "alias/aws/ebs"
_ACTIONS = ("kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKeyWithoutPlaintext", "kms:ReEncryptFrom")


def install() -> None:
    """From now on."""
    add(EC2Response, "get_ebs_default_kms_key_id", _default)


def _default(self: Any) -> ActionResult:
    self.error_on_dryrun()
    return ActionResult({"KmsKeyId": _customers(self.ec2_backend, "") or OWN})


def opens(backend: Any, disks: list[dict[str, Any]]) -> bool:
    """Whether EC2 may use the keys of such disks."""
    encrypted = [each["Ebs"] for each in disks if each["Ebs"].get("Encrypted")]
    keys = [_customers(backend, ebs.get("KmsKeyId") or "") for ebs in encrypted]
    return all(_may(backend, key) for key in keys if key)


def _customers(backend: Any, named: str) -> str:
    """The customer's key that is meant by a name, or by none; empty: it is AWS's own."""
    named = named or backend.default_kms_key_id
    if named in ("", OWN) or OWN in _key(backend, named).aliases:
        return ""
    return _key(backend, named).arn


def _key(backend: Any, named: str) -> Any:
    return kms_backends[backend.account_id][backend.region_name].describe_key(named)


def _may(backend: Any, named: str) -> bool:
    facts = {
        "kms:ViaService": f"ec2.{backend.region_name}.amazonaws.com",
        "kms:CallerAccount": backend.account_id,
        "kms:GrantIsForAWSResource": "true",
    }
    said = [
        each
        for each in json.loads(_key(backend, named).policy)["Statement"]
        if each["Effect"] == "Allow" and each["Principal"] in ("*", {"AWS": "*"})
    ]
    return all(any(permissions.covers(each, action, "*", facts) for each in said) for action in _ACTIONS)
