"""The machines of a handle, as EC2 shows them now.

EC2 answers late: what was made a moment ago may not be shown yet, and what was terminated is shown for about an hour,
and then forgotten. A machine that is not shown is judged by the age of its create, told by the create's launch template
and by the handle: old enough, and it is gone; else nothing is known of it, and `Transient` is raised.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from mgpu.errors import AuthError, Transient
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.instances import disk_key, listing, session_manager
from mgpu.providers.aws.instances.listing import Shown, by_id, tagged, tags_of
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account
from mgpu.providers.base import GOING, FleetState, Handle, Intent, NodePhase, NodeState

USER = "ubuntu"  # of the deep-learning machine images
PYTHON = "/opt/pytorch/bin/python3"  # of the deep-learning machine images with PyTorch
_TAG_CHARACTERS = 256
_NUMBER = r"[0-9]{1,4}"  # of a rank: whoever may write tags shall not make us count to a billion

_PHASES = {
    "pending": NodePhase.PENDING,
    "running": NodePhase.RUNNING,
    "shutting-down": NodePhase.ENDING,
    "stopping": NodePhase.STOPPING,
    "stopped": NodePhase.STOPPING,
    "terminated": NodePhase.TERMINATED,
}
_REASONS = {
    "Server.SpotInstanceTermination": "taken by the spot market",
    "Server.SpotInstanceShutdown": "stopped by the spot market",
    "Server.InsufficientInstanceCapacity": "EC2 had no capacity to start it",
    "Server.InternalError": "EC2 failed to start it",
    disk_key.DENIED: f"EC2 may not use the key of its disk ({disk_key.DENIED})",
    "Server.ScheduledStop": "its hardware is being retired",
    "Client.InstanceInitiatedShutdown": "it powered itself off",
    "Client.UserInitiatedShutdown": "ended by a call to EC2",
    "Client.VolumeLimitExceeded": "the account's limit of disk space is reached",
}


def describe(account: Account, options: Options, handle: Handle) -> FleetState:
    """The machines of a handle, in rank order; addresses and disks among its ids are shown as STOPPING.

    Raises:
        Transient: EC2 does not show a machine that is too new to be forgotten.
        ProviderError: EC2 refused, or did not answer.
    """
    return describe_all(account, options, [handle])[0]


def describe_all(account: Account, options: Options, handles: Sequence[Handle]) -> tuple[FleetState, ...]:
    """`describe` for many handles at once, with as few calls as one handle of them all would need."""
    shown = {
        region: by_id(account, region, [name for handle in group for name in handle.ids])
        for region, group in _by_region(handles).items()
    }
    return tuple(_state(account, options, handle, shown[handle.region]) for handle in handles)


def find(account: Account, intent: Intent) -> Handle | None:
    """What a create by this intent has made: all machines that carry its token, the terminated ones included.

    Raises:
        ProviderError: EC2 refused, or did not answer.
    """
    marks = {names.TOKEN: intent.token, names.FLEET: intent.fleet, names.OWNER: intent.owner}
    made = tagged(account, intent.offer.region, marks)
    if not made:
        return None
    return Handle(
        provider="aws",
        region=intent.offer.region,
        fleet=intent.fleet,
        generation=intent.generation,
        token=intent.token,
        ids=in_rank_order(made),
        made_at=max(machine["LaunchTime"].timestamp() for machine in made),
    )


def rekeyed(account: Account, handle: Handle, node: str, host_key: str, *, used: bool) -> None:
    """Writes a machine's new host key into its tags; `used`: the key that came with user data is met no more.

    Raises:
        ProviderError: EC2 refused, or did not answer.
    """
    ec2 = account.client("ec2", handle.region)
    with calling(f"noting the host key of {node}", handle.region):
        ec2.create_tags(Resources=[node], Tags=[{"Key": names.HOST_KEY, "Value": host_key}])
        if used:
            ec2.delete_tags(Resources=[node], Tags=[{"Key": names.ONE_USE_KEY}])


def _by_region(handles: Sequence[Handle]) -> dict[str, list[Handle]]:
    found: dict[str, list[Handle]] = {}
    for handle in handles:
        found.setdefault(handle.region, []).append(handle)
    return found


# --- ranks ------------------------------------------------------------------------------------------------------------


def ranks_tag(ranks: Iterable[int]) -> str:
    """The value of tag RANKS: `0-31`, `3,7-9`. Ranks beyond the length of a tag are left out, from the highest on."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = list(itertools.accumulate(("-".join(map(str, run)) for run in runs), lambda a, b: f"{a},{b}"))
    return max((text for text in texts if len(text) <= _TAG_CHARACTERS), key=len, default="")


def in_rank_order(machines: Iterable[Shown]) -> tuple[str, ...]:
    """Ids of one create by rank, with an empty string for a rank without a machine; no id is ever left out.

    Where a create died before it tagged its machines, their ids in alphabetical order take the ranks that it asked for.
    """
    by_rank: dict[int, str] = {}
    rest: list[Shown] = []
    for machine in sorted(machines, key=lambda each: each["InstanceId"]):
        rank = tags_of(machine).get(names.RANK, "")
        if re.fullmatch(_NUMBER, rank) and int(rank) not in by_rank:
            by_rank[int(rank)] = machine["InstanceId"]
        else:
            rest.append(machine)
    asked = _ranks(tags_of(rest[0]).get(names.RANKS, "")) if rest else []
    free = (rank for rank in itertools.chain(asked, itertools.count()) if rank not in by_rank)
    for machine in rest:
        by_rank[next(free)] = machine["InstanceId"]
    return tuple(by_rank.get(rank, "") for rank in range(max(by_rank, default=-1) + 1))


def _ranks(text: str) -> list[int]:
    runs = re.findall(rf"({_NUMBER})(?:-({_NUMBER}))?", text)
    return [rank for first, last in runs for rank in range(int(first), int(last or first) + 1)]


# --- states -----------------------------------------------------------------------------------------------------------


def forgotten(account: Account, handle: Handle) -> bool:
    """Whether a machine of this handle that EC2 does not show is gone. False: it may be too new to be shown.

    Raises:
        AuthError: the credentials are of another account, which knows nothing of these machines.
    """
    _require_the_account(account, handle)
    if time.time() - handle.made_at <= names.LAG_S:
        return False
    answer = listing.templates(account, handle.region, names.template(handle.token))
    made_at = max((each["CreateTime"].timestamp() for each in answer["LaunchTemplates"]), default=0.0)
    return _told_at(answer) - made_at > names.LAG_S


def _require_the_account(account: Account, handle: Handle) -> None:
    if handle.account not in ("", account.id()):
        raise AuthError(
            f"fleet {handle.fleet} is in AWS account {handle.account}, the credentials are of {account.id()}",
            "What one account does not show says nothing about the machines of another.",
            "Use credentials of that account: AWS_PROFILE, or `aws: {profile: ...}` in the run file.",
        )


def _told_at(answer: dict[str, Any]) -> float:
    """UNIX seconds by AWS's own clock: the operator's may be wrong by more than the lag."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date).timestamp() if date else time.time()


def phase_of(machine: Shown) -> NodePhase:
    """A machine's phase. A stopped one is STOPPING: its disk is still billed, and it is not ended."""
    return _PHASES[machine["State"]["Name"]]


def _state(account: Account, options: Options, handle: Handle, shown: dict[str, Shown]) -> FleetState:
    unseen = [name for name in handle.ids if name.startswith("i-") and name not in shown]
    if unseen and not forgotten(account, handle):
        raise Transient(
            f"EC2 does not show {', '.join(unseen)} in {handle.region} yet", "it was made just now", "Ask again."
        )
    nodes = tuple(_node(options, handle.region, rank, name, shown) for rank, name in enumerate(handle.ids))
    return FleetState(nodes=nodes if options.address != "ssm" else _registered(account, handle.region, nodes))


def _registered(account: Account, region: str, nodes: tuple[NodeState, ...]) -> tuple[NodeState, ...]:
    """Those that were not met yet, and cannot be reached yet, show no key that anybody would connect with."""
    new = {node.id for node in nodes if node.one_use_key}
    silent = session_manager.unregistered(account, region, new)
    nothing = {"host_key": "", "one_use_key": "", "reason": session_manager.NOT_REGISTERED}
    return tuple(node.model_copy(update=nothing) if node.id in silent else node for node in nodes)


def _node(options: Options, region: str, rank: int, name: str, shown: dict[str, Shown]) -> NodeState:
    if not name:
        return NodeState(rank=rank, id="", phase=NodePhase.TERMINATED, reason="no machine was made for this rank")
    if name not in shown:
        return NodeState(rank=rank, id=name, phase=NodePhase.TERMINATED, reason="EC2 knows it no more")
    if not name.startswith("i-"):
        return NodeState(rank=rank, id=name, phase=NodePhase.STOPPING, reason="left by its machine, and still billed")
    machine, tags = shown[name], tags_of(shown[name])
    phase = phase_of(machine)
    private = machine.get("PrivateIpAddress", "")
    address = machine.get("PublicIpAddress", "") if options.address == "public" else private
    reachable = phase is NodePhase.RUNNING and address
    return NodeState(
        rank=rank,
        id=name,
        phase=phase,
        address=address,
        user=USER,
        host_key=tags.get(names.HOST_KEY, "") if reachable else "",
        one_use_key=tags.get(names.ONE_USE_KEY, "") if reachable else "",
        via=session_manager.proxy_command(options, region, name) if options.address == "ssm" else options.via,
        python=options.python or PYTHON,
        private_address=private,
        price_usd_per_hour=_number(tags.get(names.PRICE, "")),
        hard_cap_at=_number(tags.get(names.HARD_CAP_AT, "")),
        reason=_reason(machine) if phase in GOING else "",
        cure=disk_key.CURE if machine.get("StateReason", {}).get("Code") == disk_key.DENIED else "",
    )


def _number(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:  # somebody has edited the tag
        return 0.0


def _reason(machine: Shown) -> str:
    cause = machine.get("StateReason", {})
    words = _REASONS.get(cause.get("Code", "")) or cause.get("Message") or machine.get("StateTransitionReason", "")
    if machine["State"]["Name"] == "stopped":
        return "; ".join(filter(None, (words, "stopped, its disk is still billed")))
    return words
