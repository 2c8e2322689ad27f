"""The end of machines and of what they leave behind, and what of an owner's still costs money.

`destroy` goes in steps, and each call of it goes as far as it can: machines terminated; once EC2 says that they are,
the addresses and disks that no machine uses, and the schedules; then, of a create all whose machines are gone, the
placement group and, last of all, the launch template: it tells how old a create is for as long as anybody may ask, and
which creates a fleet has had whose machines were all replaced.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mgpu.errors import AuthError, InvalidRequest, PermissionDenied, ProviderError, RateLimited, Transient
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling, code_of, of_organization, of_region
from mgpu.providers.aws.instances import listing, machines, reaper
from mgpu.providers.aws.instances.listing import Shown, carries, id_of, is_absent, tag_filters, tags_of, unless_absent
from mgpu.providers.aws.instances.machines import phase_of
from mgpu.providers.aws.session import Account
from mgpu.providers.base import Handle, Listing, NodePhase, as_one

_BATCH = 1000  # machines that one TerminateInstances takes
_CALLS = 100  # of TerminateInstances, before what EC2 refuses without a name is halved no more
_REGIONS_AT_ONCE = 16
_T = TypeVar("_T")
_PAUSES_S = (0.25, 0.5, 1.0)  # between two looks at a region that is busy
_LIVING = ("pending", "running", "shutting-down", "stopping", "stopped")
# answers about single machines that fail the call for all of them
_PROTECTED, _DENIED = "OperationNotPermitted", "UnauthorizedOperation"
_OF_ONE = ("IncorrectInstanceState", _PROTECTED, _DENIED)
_UNPROTECT = (
    "Turn termination protection off (`aws ec2 modify-instance-attribute --no-disable-api-termination "
    "--instance-id {id} --region {region}`), and run `mgpu down` again."
)


def destroy(account: Account, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
    """Ends these machines (default: all of the handle) and what only they used; addresses and disks may be among them.

    True: EC2 says that all are terminated, and nothing of them is left; False: call again. Absent never raises.

    Raises:
        PermissionDenied, InvalidRequest: a machine, address or disk that EC2 does not let go; nothing is left of other
            machines, and all else was asked to go. Of `nodes` at once: the others of the fleet cost money meanwhile.
        Transient: the same, while other machines of the whole are on their way out; call again.
        ProviderError: EC2 refused, or did not answer; call again.
    """
    asked = [name for name in (handle.ids if nodes is None else nodes) if name]
    if nodes is not None and not asked:
        return True
    shown = listing.by_id(account, handle.region, asked)
    ids = [name for name in asked if name.startswith("i-")]
    going, staying = _asked_to_end(account, handle, ids, shown)
    refused, gone = list(dict.fromkeys(staying.values())), False
    try:
        gone = not going and _cleared(account, handle, shown, set(ids) - staying.keys(), whole=nodes is None)
    except (PermissionDenied, InvalidRequest) as error:
        refused.append(error)
    else:
        if refused and not gone and nodes is None:
            refused.append(Transient(f"{refused[0].what}; all else is on its way out"))
    if refused:
        raise as_one(refused)
    return gone


def list_owned(account: Account, owner: str) -> Listing:
    """All that carries this owner's tag and costs money, in all regions that are enabled: machines, and the addresses
    and disks that no machine uses. One handle for each create; `ids` has the machines in rank order, then the rest.
    `closed` are the regions whose machines the account's organization lets nobody see, and those that were enabled by
    hand and do not take these credentials, which others take: nobody can rent there, as things are.

    Raises:
        ProviderError: a region did not answer, or all are closed; nothing is told then, because it would not be all.
    """
    regions = _insist(account.regions)
    with ThreadPoolExecutor(max_workers=_REGIONS_AT_ONCE) as pool:
        found = list(pool.map(lambda region: _insist(lambda: _owned_in(account, region, owner)), regions))
    closed = {region: each for region, each in zip(regions, found, strict=True) if not isinstance(each, list)}
    if closed and len(closed) == len(regions):
        raise next(iter(closed.values()))
    handles = (each for each in found if isinstance(each, list))
    return Listing(handles=tuple(itertools.chain.from_iterable(handles)), closed=dict(closed))


# --- machines ---------------------------------------------------------------------------------------------------------


def _asked_to_end(
    account: Account, handle: Handle, ids: list[str], shown: dict[str, Shown]
) -> tuple[list[str], dict[str, ProviderError]]:
    """Those of these machines that are on their way out, and why EC2 does not let go of others; all that are not
    terminated were asked to end."""
    live = [name for name in ids if name in shown and phase_of(shown[name]) is not NodePhase.TERMINATED]
    unseen = [name for name in ids if name not in shown]
    unsure = unseen if unseen and not machines.forgotten(account, handle) else []
    idle = [name for name in live if shown[name]["State"]["Name"] != "shutting-down"]
    staying = _terminate(account, handle.region, idle + unsure)
    return [name for name in live + unsure if name not in staying], staying


def _terminate(account: Account, region: str, ids: list[str]) -> dict[str, ProviderError]:
    """Asks EC2 to end machines, and says of those that it does not let go why. One bad id fails a whole call, so a call
    that fails for its ids is made again in two parts, those that EC2 names and the others, until the bad ones stand
    alone. Where it names none, halves are the parts; so of a denial, which names one and is meant for most."""
    from botocore.exceptions import ClientError

    ec2, waiting = account.client("ec2", region), list(listing.in_batches(ids, _BATCH))
    refused, protected = dict[str, ProviderError](), list[str]()
    for some in waiting:  # it grows on the way
        try:
            with calling(f"ending {some[0] if len(some) == 1 else f'{len(some)} machines'}", region):
                ec2.terminate_instances(InstanceIds=some)
        except ProviderError as error:
            cause = error.__cause__
            if not isinstance(cause, ClientError) or not (is_absent(cause) or code_of(cause) in _OF_ONE):
                raise
            named = [name for name in some if name in str(cause) and code_of(cause) != _DENIED]
            if 0 < len(named) < len(some):
                waiting += [named, [name for name in some if name not in named]]
            elif len(some) > 1 and len(waiting) < _CALLS:
                waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
            elif not is_absent(cause):
                refused |= dict.fromkeys(some, error)
                protected += some if code_of(cause) == _PROTECTED else ()
    for name in protected:
        refused[name].next_step = _UNPROTECT.format(id=name if len(protected) == 1 else "ID", region=region)
    return refused


# --- what machines leave behind ---------------------------------------------------------------------------------------


def _cleared(account: Account, handle: Handle, shown: dict[str, Shown], ended: set[str], *, whole: bool) -> bool:
    """Whether nothing is left of what these machines alone had, and of creates all whose machines are terminated; it is
    asked to go. `whole`: of all creates of the fleet. Raises ProviderError."""
    tokens = {handle.token, *(tags_of(resource).get(names.TOKEN, "") for resource in shown.values())} - {""}
    if whole:
        tokens |= _creates(account, handle, shown)
    left = [resource for name, resource in shown.items() if not name.startswith("i-")]
    left += _left_by(account, handle.region, tokens)
    gone, refused = list[bool](), list[ProviderError]()
    for resource in left:  # also what comes after one that EC2 does not let go
        try:
            gone.append(_discarded(account, handle.region, resource, ended))
        except (PermissionDenied, InvalidRequest) as error:
            refused.append(error)
    if refused:
        raise as_one(refused)
    if not all(gone):
        return False
    reaper.disarm(account, handle.region, ended)
    return _closed(account, handle.region, tokens)


def release(account: Account, region: str, filters: list[dict[str, Any]]) -> bool:
    """Gives back those of our addresses that pass these filters, although their machines are still on their way out.
    False: call again. Raises ProviderError."""
    ours = {"Name": "tag-key", "Values": [names.TOKEN]}
    found = listing.addresses(account, region, [*filters, ours])
    released = [_released(account, region, address) for address in found]
    return all(released)


def _creates(account: Account, handle: Handle, shown: dict[str, Shown]) -> set[str]:
    """Tokens of all creates of this fleet, as far as their templates stand: a repair leaves the one before behind."""
    found = [tags_of(each) for each in listing.templates_of(account, handle.region, handle.fleet)]
    known = [*map(tags_of, shown.values()), *(each for each in found if each.get(names.TOKEN) == handle.token)]
    owners = {each.get(names.OWNER) for each in known}
    return {each.get(names.TOKEN, "") for each in found if each.get(names.OWNER) in owners} - {""}


def _left_by(account: Account, region: str, tokens: Iterable[str]) -> Iterator[Shown]:
    """Addresses and disks of these creates."""
    for some in listing.in_batches(sorted(tokens)):
        of_these = [{"Name": f"tag:{names.TOKEN}", "Values": some}]
        yield from listing.addresses(account, region, of_these)
        yield from listing.disks(account, region, of_these)


def _discarded(account: Account, region: str, resource: Shown, ended: set[str]) -> bool:
    """Whether an address or a disk is gone, or in use by a machine that is not among those that were ended."""
    user = _user_of(resource)
    if user and user not in ended:
        return True
    if "AllocationId" in resource:
        return _released(account, region, resource)
    if user or resource["State"] == "deleting":  # EC2 is at it
        return False
    with calling(f"deleting disk {resource['VolumeId']}", region), unless_absent():
        account.client("ec2", region).delete_volume(VolumeId=resource["VolumeId"])
    return False  # it takes its time


def _released(account: Account, region: str, address: Shown) -> bool:
    from botocore.exceptions import ClientError

    ec2 = account.client("ec2", region)
    with calling(f"releasing address {address['AllocationId']}", region), unless_absent():
        if "AssociationId" in address:
            ec2.disassociate_address(AssociationId=address["AssociationId"])
    with calling(f"releasing address {address['AllocationId']}", region), unless_absent():
        try:
            ec2.release_address(AllocationId=address["AllocationId"])
        except ClientError as error:
            if code_of(error) != "InvalidIPAddress.InUse":
                raise
            return False
    reaper.disarm(account, region, [address["AllocationId"]])
    return True


def _user_of(resource: Shown) -> str:
    """The machine that an address or a disk belongs to, or an empty string."""
    attached = resource.get("Attachments", [resource])
    return attached[0].get("InstanceId") or "" if attached else ""


def _closed(account: Account, region: str, tokens: set[str]) -> bool:
    """Whether nothing is left of the creates all whose machines are terminated."""
    living = set[str]()
    for some in listing.in_batches(sorted(tokens)):
        found = listing.filtered(account, region, [{"Name": f"tag:{names.TOKEN}", "Values": some}], _LIVING)
        living |= {tags_of(machine)[names.TOKEN] for machine in found}
    closed = [_close(account, region, names.template(token)) for token in sorted(tokens - living)]
    return all(closed)


def _close(account: Account, region: str, name: str) -> bool:
    from botocore.exceptions import ClientError

    ec2 = account.client("ec2", region)
    with calling(f"deleting placement group {name}", region), unless_absent():
        try:
            ec2.delete_placement_group(GroupName=name)
        except ClientError as error:
            if code_of(error) != "InvalidPlacementGroup.InUse":
                raise
            return False
    for template in listing.templates(account, region, name)["LaunchTemplates"]:
        with calling(f"deleting launch template {name}", region), unless_absent():
            ec2.delete_launch_template(LaunchTemplateId=template["LaunchTemplateId"])
    return True


# --- what an owner has ------------------------------------------------------------------------------------------------


def _insist(look: Callable[[], _T]) -> _T:
    """The answer of one region, which is asked again where it is only busy: a hundred calls have to go well for a whole
    listing, and whoever asks for that would begin with all of them anew."""
    for pause_s in _PAUSES_S:
        try:
            return look()
        except (RateLimited, Transient):
            time.sleep(random.uniform(pause_s / 2, pause_s))
    return look()


def _owned_in(account: Account, region: str, owner: str) -> list[Handle] | PermissionDenied | AuthError:
    """What the owner has there; or why the region is closed."""
    marks = {names.OWNER: owner}
    try:
        resources = listing.tagged(account, region, marks, _LIVING)
    except PermissionDenied as error:
        if not of_organization(error):
            raise
        return error
    except AuthError as error:
        if not (of_region(error) and region in account.opted_in()):
            raise
        return error
    loose = listing.addresses(account, region, tag_filters(marks)) + listing.disks(account, region, tag_filters(marks))
    resources += [each for each in loose if carries(each, marks) and not _user_of(each)]
    creates: dict[tuple[str, str], list[Shown]] = {}
    for resource in resources:
        tags = tags_of(resource)
        creates.setdefault((tags.get(names.FLEET, ""), tags.get(names.TOKEN, "")), []).append(resource)
    return [_handle(region, fleet, token, each) for (fleet, token), each in sorted(creates.items())]


def _handle(region: str, fleet: str, token: str, resources: list[Shown]) -> Handle:
    ranked = [each for each in resources if id_of(each).startswith("i-")]
    loose = sorted(id_of(each) for each in resources if not id_of(each).startswith("i-"))
    generation = tags_of(resources[0]).get(names.GENERATION, "")
    return Handle(
        provider="aws",
        region=region,
        fleet=fleet,
        generation=int(generation) if generation.isdecimal() else 0,
        token=token,
        ids=(*machines.in_rank_order(ranked), *loose),
        made_at=max((each["LaunchTime"].timestamp() for each in ranked), default=0),
    )
