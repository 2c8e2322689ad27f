"""The role of one run, which opens what the run names of the object store, and nothing else.

All machines have one role, `mgpu-node`, which opens no bucket. A run's own role is taken on by whoever has that one and
knows the run's secret; AWS bounds the session to what the run's policy says, and to the boundary that `base` has made.
Nodes renew their sessions by themselves, also when the operator is gone; no key of the operator's ever travels.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu.errors import InputError
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling, code_of, patiently, unless
from mgpu.providers.aws.iam import policies
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

_POLICY = "run"
_ABSENT = ("NoSuchEntity",)
# what IAM says of a role, or a policy, that it has made a moment ago: also where a document names the role
_NOT_YET = (*_ABSENT, "MalformedPolicyDocument")
_SETTLE_S = 30.0
_BOOTSTRAP = "Run `mgpu bootstrap aws` again: it makes what is missing, and changes nothing else."


def require(account: Account, options: Options, urls: Sequence[str]) -> None:
    """Raises InputError where nodes can be given no rights at one of these addresses, all of them named; ProviderError.

    With `aws.instance_profile` the machines have a role of the user's, and whatever that opens is open.
    """
    if options.instance_profile or not urls:
        return
    home = account.home_region
    with calling("looking at what runs may be given", home, scope="account"):
        named = _named(account)
    if named is None:
        raise InputError(
            "the base of this account has no rights for single runs",
            f"There is no policy {names.RUN_BOUNDARY}, which bounds what a run's role may do.",
            _BOOTSTRAP,
        )
    outside = sorted({bucket for url in urls if not _opens(account, named, url) for bucket in [policies.place(url)[0]]})
    if outside:
        flags = " ".join(f"--data-bucket {bucket}" for bucket in outside)
        raise InputError(
            f"nodes may not use the bucket{'s' if len(outside) > 1 else ''} {', '.join(outside)}",
            "A run's role opens `runs/` of a bucket of base, and buckets that were named to `mgpu bootstrap aws`; the "
            "operator's own keys go to no machine.",
            f"`mgpu bootstrap aws {flags}` names them; or give the machines a role of yours: `aws.instance_profile`.",
        )


def grant(
    account: Account, options: Options, run_id: str, reads: Sequence[str], writes: Sequence[str]
) -> Mapping[str, str]:
    """Makes the run's role, or brings the one that it has in line; what its nodes need to take it on: variables of
    their store client. Raises what `require` raises."""
    if options.instance_profile or not (reads or writes):
        return {}
    require(account, options, [*reads, *writes])
    home, name = account.home_region, names.run_role(run_id)
    iam = account.client("iam", home)
    with calling(f"giving run {run_id} its rights", home, scope="account"):
        unlike = {key.lower(): (key, value) for key, value in (*options.tags.items(), (names.RUN, run_id))}
        tags = dict(unlike.values())  # IAM refuses keys that differ in case alone, EC2 takes them
        role = _role(iam, name) or patiently(lambda: _make(account, iam, name, tags), _NOT_YET, _SETTLE_S)
        document = json.dumps(policies.run(home, reads, writes), separators=(",", ":"))
        policy = {"RoleName": name, "PolicyName": _POLICY, "PolicyDocument": document}
        patiently(lambda: iam.put_role_policy(**policy), _NOT_YET, _SETTLE_S)
    secret = role["AssumeRolePolicyDocument"]["Statement"][0]["Condition"]["StringEquals"]["sts:ExternalId"]
    return {"MGPU_STORE_ROLE": role["Arn"], "MGPU_STORE_EXTERNAL_ID": secret, "AWS_REGION": home}


def revoke(account: Account, options: Options, run_id: str) -> None:
    """Takes the run's role away; absent is success. Raises ProviderError."""
    if options.instance_profile:
        return
    home, role = account.home_region, {"RoleName": names.run_role(run_id)}
    iam = account.client("iam", home)
    with calling(f"taking the rights of run {run_id} away", home, scope="account"):
        unless(_ABSENT, iam.delete_role_policy, **role, PolicyName=_POLICY)
        unless(_ABSENT, iam.delete_role, **role)


def boundary(account: Account) -> policies.Document | None:
    """What bounds all runs' roles, as it is; None: base has not made it. Raises botocore's errors."""
    iam, arn = account.client("iam", account.home_region), boundary_arn(account)
    policy = unless(_ABSENT, iam.get_policy, PolicyArn=arn)
    if policy is None:
        return None
    version = iam.get_policy_version(PolicyArn=arn, VersionId=policy["Policy"]["DefaultVersionId"])
    return version["PolicyVersion"]["Document"]


def boundary_arn(account: Account) -> str:
    """The ARN of what bounds all runs' roles."""
    return f"arn:{policies.partition(account.home_region)}:iam::{account.id()}:policy/{names.RUN_BOUNDARY}"


def _make(account: Account, iam: Any, name: str, tags: Mapping[str, str]) -> Mapping[str, Any]:
    trust = policies.run_trust(account.home_region, account.id(), secrets.token_hex(16))
    try:
        made = iam.create_role(
            RoleName=name,
            Path=names.RUN_ROLES,
            AssumeRolePolicyDocument=json.dumps(trust),
            PermissionsBoundary=boundary_arn(account),
            Description="made by mgpu, for as long as its run lasts",
            Tags=names.tag_list(tags),
        )["Role"]
    except Exception as error:
        found = _role(iam, name) if code_of(error) == "EntityAlreadyExists" else None
        if found is None:
            raise
        return found  # another process was quicker: its secret counts
    return {**made, "AssumeRolePolicyDocument": trust}


def _role(iam: Any, name: str) -> Mapping[str, Any] | None:
    answer = unless(_ABSENT, iam.get_role, RoleName=name)
    return answer["Role"] if answer else None


def _named(account: Account) -> frozenset[str] | None:
    """The buckets beside those of base that the boundary names; None: there is no boundary."""
    document = boundary(account)
    return None if document is None else frozenset(policies.bounded(document))


def _opens(account: Account, named: frozenset[str], url: str) -> bool:
    bucket, prefix = policies.place(url)
    ours = re.fullmatch(names.bucket(account.id(), "[a-z0-9-]+"), bucket) is not None
    return bucket in named or (ours and f"{prefix}/".startswith(f"{policies.RUNS}/"))
