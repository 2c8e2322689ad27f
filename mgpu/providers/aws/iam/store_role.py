"""What the nodes' own role opens of the object store: what runs keep in a bucket of `base`."""

from __future__ import annotations

import re

from mgpu.providers.aws import names
from mgpu.providers.aws.iam import policies
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account


def opened_by_role(account: Account, options: Options, url: str) -> bool:
    """True for an address under `runs/` of a bucket of this account's base, in whatever region; of a role that the run
    file names, nobody knows what it opens. Raises what `Account.id` raises."""
    if options.instance_profile:
        return False
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    ours = names.bucket(r"(?P<account>[0-9]{12})", "[a-z0-9-]+")
    found = re.fullmatch(ours, bucket)
    inside = prefix.rstrip("/") == policies.RUNS or prefix.startswith(f"{policies.RUNS}/")
    return found is not None and inside and found["account"] == account.id()
