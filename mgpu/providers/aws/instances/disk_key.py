"""The key of machines' disks: the account's default in a region, AWS's own or one of the customer's.

With one of the customer's that EC2 may not use machines are granted, and die as they start, with this code and no other
word. The key's policy has to let EC2 use it for whoever starts machines: the operator, and EC2's own role for spot.
"""

from __future__ import annotations

import json
from typing import Any

from mgpu.errors import ProviderError
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.session import Account
from mgpu.providers.base import Finding

DENIED = "Client.InternalError"
CURE = "`mgpu check aws` names the key, and prints the statement that its policy needs."
_OWN = "alias/aws/ebs"
_ACTIONS = [
    "kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKey*", "kms:ReEncrypt*",
]  # fmt: skip


def finding(account: Account, region: str) -> Finding:
    """Whether EC2 can encrypt machines' disks there. Raises ProviderError."""
    subject = f"disks {region}"
    with calling("asking for the default key of disks", region):
        key = account.client("ec2", region).get_ebs_default_kms_key_id()["KmsKeyId"]
    if key == _OWN:
        return Finding(subject=subject, status="ok", detail=f"encrypted with AWS's own key, {_OWN}")
    try:
        with calling("reading the policy of a key", region):
            said = account.client("kms", region).get_key_policy(KeyId=key, PolicyName="default")["Policy"]
    except ProviderError as error:
        detail = f"encrypted with {key}, which is yours; whether EC2 may use it is not known: {error.what}"
    else:
        if any(_lets_in(each, account.id(), region) for each in json.loads(said)["Statement"]):
            return Finding(subject=subject, status="ok", detail=f"encrypted with {key}, which EC2 may use")
        detail = f"encrypted with {key}, whose policy does not say that EC2 may use it"
    return Finding(
        subject=subject,
        status="warning",
        detail=f"{detail}: machines may die as they start",
        cure="Have this statement put into the policy of the key, unless IAM and grants let the operator, and "
        "AWSServiceRoleForEC2Spot, use it.",
        document=statement(account.id(), region),
    )


def statement(account: str, region: str) -> dict[str, Any]:
    """What a key's policy says by which EC2 uses it for everybody of the account who may start machines."""
    return {
        "Sid": "DisksOfEC2",
        "Effect": "Allow",
        "Principal": {"AWS": "*"},
        "Action": _ACTIONS,
        "Resource": "*",
        "Condition": {"StringEquals": {"kms:CallerAccount": account, "kms:ViaService": f"ec2.{region}.amazonaws.com"}},
    }


def _lets_in(said: dict[str, Any], account: str, region: str) -> bool:
    """Whether a statement is the one above, or as good: AWS's own keys have such a one. What it asks besides may not
    be so."""
    conditions: dict[str, dict[str, Any]] = said.get("Condition", {})
    asked = conditions.get("StringEquals", {})
    here = {"kms:CallerAccount": account, "kms:ViaService": f"ec2.{region}.amazonaws.com"}
    actions = [said["Action"]] if isinstance(said.get("Action"), str) else said.get("Action", [])
    return (
        said.get("Effect") == "Allow"
        and said.get("Principal") in ("*", {"AWS": "*"})
        and {"kms:CreateGrant", "kms:*", "*"}.intersection(actions) != set()
        and conditions.keys() <= {"StringEquals"}
        and all(here.get(key) in _many(values) for key, values in asked.items())
    )


def _many(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given
