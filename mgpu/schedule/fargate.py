"""A schedule of EventBridge's that starts one pass on Fargate: what it needs, found out before anything is made.

A task is a member of the nodes' security group, in the network that they are in: so it reaches them at their private
addresses, whomever `mgpu bootstrap aws` lets in from outside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from mgpu.backend import location, settings
from mgpu.context import Context
from mgpu.errors import InputError
from mgpu.iac import environment
from mgpu.iac.aws import bootstrap
from mgpu.iac.aws.passes import PassesStack
from mgpu.iac.engine import state_file
from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap.resource import Site
from mgpu.providers.aws.failures import calling, unless
from mgpu.providers.aws.iam import policies, run_role
from mgpu.providers.aws.instances import network
from mgpu.providers.aws.passes.documents import CPU_UNITS, MEMORY_MIB
from mgpu.providers.aws.passes.manager import PassesManager
from mgpu.providers.aws.session import Account
from mgpu.providers.base import NETWORK
from mgpu.schedule import callers
from mgpu.words import duration

_PASS_S = 3600  # a pass that lasts longer is ended, and the next one goes on with its runs
_GRACE_S = 60  # supervisors take 20 s of it to save what they know
_COMMAND = (
    f"{callers.PUT_IN_PLACE}; unset {callers.PASSPHRASE}; exec timeout --kill-after={_GRACE_S} {_PASS_S} mgpu reconcile"
)
_IMAGE = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([a-z0-9/._-]+)@(sha256:[0-9a-f]{64})")
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/AWS_Fargate-Regions.html
_WITHOUT_FARGATE = ("use1-az3",)
# US dollars in us-east-1, 2026-11: https://aws.amazon.com/fargate/pricing/ (Linux, x86), https://aws.amazon.com/vpc/pricing/
_VCPU_HOUR, _GB_HOUR, _ADDRESS_HOUR = 0.04048, 0.004445, 0.005
_MONTH_MINUTES = 730 * 60


@dataclass(frozen=True)
class PassesPlan:
    """What is to be made. `secrets`: values by variable, to be written; `kept`: those that are there already;
    `missing`: those that run files name, and that nobody has given."""

    account: Account
    region: str
    every_minutes: int
    image: str
    asked: Mapping[str, object]
    secrets: Mapping[str, str]
    kept: frozenset[str]
    missing: tuple[str, ...]

    def stack(self, context: Context) -> PassesStack:
        """Its stack."""
        return PassesStack(self.account, self.region, context, callers.caller_name(), self.asked)

    @property
    def usd_per_month(self) -> float:
        """Where a pass takes a minute, which is the least that Fargate bills."""
        hour = CPU_UNITS / 1024 * _VCPU_HOUR + MEMORY_MIB / 1024 * _GB_HOUR + _ADDRESS_HOUR
        return hour / 60 * _MONTH_MINUTES / self.every_minutes


def plan(every_s: float, image: str | None, boundary: str) -> PassesPlan:
    """What is to be made, from what there is.

    Raises:
        InputError: no pass could work: the period, the backend, the image.
        NoOffer: the region has no base, or no default network.
        ProviderError: AWS refused, or did not answer.
    """
    minutes = _minutes(every_s)
    account, region = _where()
    key = _key()
    _require_image(account, region, image)
    there = network.subnets(account, account.options, region)
    vpc = there[0]["VpcId"]
    subnets = [each["SubnetId"] for each in there if each.get("AvailabilityZoneId") not in _WITHOUT_FARGATE]
    with calling("looking at what runs may be given", region, scope="account"):
        bound = run_role.boundary(account)
        known = PassesManager(Site(account, region)).secrets(callers.caller_name())
    wanted = callers.variable_names()
    secrets = {name: os.environ[name] for name in wanted if os.environ.get(name)}
    if not key:
        secrets[callers.PASSPHRASE] = _passphrase()
    kept = (known & {*wanted}) - {*secrets}
    variables = {location.VARIABLE: callers.url_elsewhere(), "AWS_REGION": region, NETWORK: vpc}
    asked = {
        "image": image,
        "everyMinutes": minutes,
        "command": _COMMAND,
        "environment": [f"{name}={value}" for name, value in variables.items()],
        "secrets": sorted({*secrets} | kept),
        "backend": location.current().address,
        "buckets": sorted(policies.bounded(bound)) if bound else [],
        "subnets": sorted(subnets),
        "securityGroup": network.group_of(account, account.options, region, vpc),
    }
    given = {name: value for name, value in {"key": key, "permissionsBoundary": boundary}.items() if value}
    missing = tuple(sorted({*wanted} - {*secrets} - kept))
    return PassesPlan(account, region, minutes, str(image), {**asked, **given}, secrets, kept, missing)


def installed(context: Context) -> PassesStack:
    """What there is to take back. Raises InputError: the backend is a folder, or is not at AWS; ProviderError."""
    account, region = _where()
    return PassesStack(account, region, context, callers.caller_name())


def _minutes(every_s: float) -> int:
    minutes = round(every_s / 60)
    if minutes < 1 or minutes * 60 != every_s:
        why = "EventBridge Scheduler counts whole minutes, one at least."
        raise InputError(f"--every {duration(every_s)}", why, "Take 5m or 10m.")
    return minutes


def _where() -> tuple[Account, str]:
    """The account and the region of the backend's bucket."""
    callers.require_bucket("--aws")
    given = dict(parse_qsl(urlsplit(location.current().url).query))
    endpoint = given.get("endpoint")
    if endpoint and endpoint != os.environ.get("AWS_ENDPOINT_URL"):
        why = f"It is at {endpoint}: a task has the rights of a role of AWS's, and no key for anything else."
        raise InputError("--aws: the backend is not at AWS", why, "Take another way, or move the backend to S3.")
    account = bootstrap.account_of("", given.get("profile", ""), "")
    region = callers.region()
    bootstrap.require_regions(account, (region,))
    return account, region


def _key() -> str:
    """The key of KMS that encrypts the secrets of stacks; "": a passphrase does."""
    whose = settings.secrets_provider()
    if whose == settings.PASSPHRASE:
        return ""
    if not whose.startswith("awskms://"):
        why = "A task has the rights of a role of AWS's alone."
        raise InputError(f"--aws: {whose} encrypts the secrets of stacks", why, "Take another way.")
    return whose


def _passphrase() -> str:
    """This machine's. Raises InputError: it has none, and the backend has stacks, which a new one would not open."""
    path = environment.passphrase_file()
    if not path.exists() and any(state_file.stacks()):
        why = f"{path} is not there, and the backend has stacks whose secrets need it."
        raise InputError("--aws: the backend's passphrase is not on this machine", why, "Copy it from one that has it.")
    return environment.make_passphrase().read_text(encoding="utf-8").strip()


def _require_image(account: Account, region: str, image: str | None) -> None:
    """Raises InputError: it is not in the account's ECR in this region, by digest."""
    ours = f"{account.id()}.dkr.ecr.{region}.amazonaws.com/{names.REPOSITORY}"
    cure = f"Make one: `mgpu image operator {ours}` prints what to give."
    if image is None:
        raise InputError("--aws: which image has mgpu?", "A task runs one that was built before.", cure)
    found = _IMAGE.fullmatch(image)
    if found is None:
        why = "It has to be in ECR, by its digest: repository@sha256:..."
        raise InputError(f"--image {image}", why, cure)
    whose, where, repository, digest = found.groups()
    if (whose, where) != (account.id(), region):
        why = f"The backend is in {region} of account {account.id()}; from there each pass pulls its image for nothing."
        raise InputError(f"--image {image} is in {where} of account {whose}", why, cure)
    asked = {"repositoryName": repository, "imageIds": [{"imageDigest": digest}]}
    with calling(f"looking for the image {repository}", region):
        there = unless(("RepositoryNotFoundException",), account.client("ecr", region).batch_get_image, **asked)
    if not (there and there["images"]):
        raise InputError(f"--image {image} is not there", f"{repository} has no image of that digest.", cure)
