"""What goes wrong with requests: errors before and after they ran, answers that are lost, calls that hang."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fnmatch import fnmatchcase

from werkzeug.wrappers import Response

from fakes.aws.protocol import Call, refusal

ACCOUNT = "123456789012"
# codes that AWS spells by the protocol of the service: EC2, query and S3, JSON
SPELLED = {
    "Throttling": ("RequestLimitExceeded", "Throttling", "ThrottlingException"),
    "Denied": ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException"),
    "Expired": ("RequestExpired", "ExpiredToken", "ExpiredTokenException"),
    "Unavailable": ("Unavailable", "ServiceUnavailable", "ServiceUnavailableException"),
}
TEXTS = {
    "Throttling": "Request limit exceeded.",
    "Expired": "The security token included in the request is expired",
    "Unavailable": "The service is unavailable. Please try again shortly.",
}
STATUS = {"Unavailable": 503, "InternalError": 500, "Denied": 403, "Expired": 400}
QUERY = ("sts", "iam", "s3", "monitoring")


@dataclass
class Fault:
    """One rule; `left` is how many calls it has still to hit, None without end."""

    action: str  # "CreateFleet", "Describe*", "*"
    kind: str  # "error", "lose", "hang"
    left: int | None = None
    share: float = 1.0
    code: str = ""
    message: str = ""
    status: int | None = None
    after: bool = False  # it ran, whatever the answer says
    seconds: float = 0.0
    region: str = "*"
    skip: int = 0  # so many calls first go well


class Faults:
    """The rules about requests, and whom they hit."""

    def __init__(self) -> None:
        self.rules: list[Fault] = []
        self._dice = random.Random(0)  # the same calls are hit each time

    def hit(self, call: Call) -> list[Fault]:
        """The rules that this call meets; each of them is used up by one."""
        return [rule for rule in self.rules if self._hits(rule, call)]

    def _hits(self, rule: Fault, call: Call) -> bool:
        if not fnmatchcase(call.action, rule.action) or not fnmatchcase(call.region, rule.region):
            return False
        if rule.skip:
            rule.skip -= 1
            return False
        if rule.left == 0 or self._dice.random() >= rule.share:
            return False
        if rule.left is not None:
            rule.left -= 1
        return True

    def denial(self, service: str, action: str) -> str | None:
        """The text of a denial of this action, if there is one; nothing is used up."""
        denied = [rule for rule in self.rules if rule.code == "Denied" and fnmatchcase(action, rule.action)]
        return denial(service, action) if denied else None


def denial(service: str, action: str) -> str:
    """As IAM words it."""
    who = f"arn:aws:iam::{ACCOUNT}:user/operator"
    return (
        f"You are not authorized to perform this operation. User: {who} is not authorized to perform: "
        f"{service}:{action} because no identity-based policy allows the {service}:{action} action."
    )


def answer(rule: Fault, call: Call) -> Response:
    """The error that a rule gives, as the service of the call says it."""
    code, text = rule.code, rule.message or TEXTS.get(rule.code, f"{rule.code}, as the test wants it")
    status = rule.status or STATUS.get(code, 400)
    if code == "Denied":
        text = denial(call.service, call.action)
    if code == "Throttling" and call.service in ("ec2", "s3"):
        code, status = "SlowDown" if call.service == "s3" else code, 503
    return refusal(call, spelled(code, call.service), text, status)


def spelled(code: str, service: str) -> str:
    """The name that a service has for this error."""
    return SPELLED[code][0 if service == "ec2" else 1 if service in QUERY else 2] if code in SPELLED else code
