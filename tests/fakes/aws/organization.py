"""The policy of the organization that an account belongs to: its denials come before whatever the account allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from werkzeug.wrappers import Response

from fakes.aws import faults
from fakes.aws.faults import ACCOUNT
from fakes.aws.permissions import Statement, denied
from fakes.aws.protocol import Call, refusal

# what a call makes, of the kinds that EC2 asks policies about
MADE = {
    "AllocateAddress": ("elastic-ip",),
    "CreateFleet": ("fleet", "instance", "volume"),
    "CreateLaunchTemplate": ("launch-template",),
    "CreatePlacementGroup": ("placement-group",),
    "CreateSecurityGroup": ("security-group",),
}


def refused(call: Call, policy: list[Statement]) -> Response | None:
    """AWS's answer where the policy denies the call."""
    action = f"{call.service}:{call.action}"
    if not any(denied(policy, action, resource, facts) for resource, facts in _asked(call)):
        return None
    text = faults.denial(call.service, call.action).partition(" because")[0]
    words = f"{text} with an explicit deny in a service control policy"
    return refusal(call, faults.spelled("Denied", call.service), words, 403)


def _asked(call: Call) -> Iterator[tuple[str, Mapping[str, str]]]:
    """What policies are asked about, with the tags that the request gives it; those of a template are not looked at."""
    asked: dict[str, Any] = call.parameters
    for kind in MADE.get(call.action, ()):
        tagged = [each["Tags"] for each in asked.get("TagSpecifications", ()) if each["ResourceType"] == kind]
        yield f"arn:aws:ec2:{call.region}:{ACCOUNT}:{kind}/new", _facts(tag for tags in tagged for tag in tags)
    if call.action not in MADE:
        yield "*", _facts(asked.get("Tags") or asked.get("tags") or ())


def _facts(tags: Any) -> Mapping[str, str]:
    given = [(each.get("Key", each.get("key")), each.get("Value", each.get("value"))) for each in tags]
    return {f"aws:RequestTag/{key}": value for key, value in given}
