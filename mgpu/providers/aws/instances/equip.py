"""What machines get once they exist: their ranks, the kill switch at the hard cap, public addresses where EC2 gives
none. Every step may be made again, by whoever finds it undone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mgpu.errors import InvalidRequest, PermissionDenied, QuotaExceeded, Transient
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling, code_of, patiently
from mgpu.providers.aws.instances import listing, network, reaper
from mgpu.providers.aws.instances.fleet_request import Order
from mgpu.providers.aws.instances.listing import Shown, tags_of
from mgpu.providers.aws.session import Account
from mgpu.providers.base import Handle

_AT_ONCE = 16  # calls in flight
_QUOTA = "L-0263D0A3"  # of public addresses in a region; 5 where nobody has asked for more
_IAM_S = 60.0  # until other services know of a new role
_ENDED = ("shutting-down", "terminated")
# of a machine that is pending, or has just ended; of one that has an address already, which EC2 did not list yet
_NOT_YET = ("IncorrectInstanceState", "InvalidInstanceID", "Resource.AlreadyAssociated")
_TOO_NEW = ("InvalidAllocationID.NotFound",)  # of an address; the next look may not list it either, and rent one more
_NEW_S = 15.0


def finish(account: Account, order: Order, handle: Handle, *, hard_cap_at: float) -> None:
    """Gives the machines of this order what they lack; those that have ended are passed over. `hard_cap_at`: UNIX s.

    Raises:
        Transient: EC2 does not show a machine well enough yet, or it does not run yet; call again.
        QuotaExceeded: the account may have no more public addresses.
        ProviderError: AWS refused, or did not answer.
    """
    shown = listing.by_id(account, order.region, handle.ids)
    ranks = {
        rank: name
        for rank, name in enumerate(handle.ids)
        if name and not (name in shown and shown[name]["State"]["Name"] in _ENDED)
    }
    _tag(account, order, {rank: name for rank, name in ranks.items() if not _has_rank(shown.get(name), rank)})
    if ranks:
        _arm(account, order, ranks.values(), hard_cap_at, handle.made_at)
    if order.wants_address(network.kind(account, order.region, order.offer.instance_type)):
        kill_switch = lambda address: _arm(account, order, [address], hard_cap_at, handle.made_at)  # noqa: E731
        _give_addresses(account, order, ranks, shown, kill_switch)  # last: a machine has to run first


def _arm(account: Account, order: Order, ids: Iterable[str], hard_cap_at: float, made_at: float) -> None:
    try:
        reaper.arm(account, order.options, order.region, ids, hard_cap_at)
    except InvalidRequest as error:
        if "assume the role" in error.why and time.time() - made_at < _IAM_S:
            raise Transient(error.what, f"{error.why}\nthe role may be new", "Try again.") from error
        raise


def _has_rank(machine: Shown | None, rank: int) -> bool:
    return machine is not None and tags_of(machine).get(names.RANK) == str(rank)


def _tag(account: Account, order: Order, ranks: dict[int, str]) -> None:
    from botocore.exceptions import ClientError

    ec2 = account.client("ec2", order.region)

    def tag(rank: int, name: str) -> None:
        with calling(f"tagging {name}", order.region):
            try:
                ec2.create_tags(Resources=[name], Tags=names.tag_list({names.RANK: str(rank)}))
            except ClientError as error:
                _unless_new(error, name)

    _each(tag, ranks.items())


def _give_addresses(
    account: Account,
    order: Order,
    ranks: dict[int, str],
    shown: dict[str, Shown],
    kill_switch: Callable[[str], None],
) -> None:
    ec2 = account.client("ec2", order.region)
    found = listing.addresses(account, order.region, listing.tag_filters({names.TOKEN: order.token}))
    # a call whose answer was lost has rented one more for a rank: the one in use counts
    rented = {tags_of(each).get(names.RANK, ""): each for each in sorted(found, key=_is_used)}

    def give(rank: int, name: str) -> None:
        address = rented.get(str(rank)) or _rent(ec2, order, rank)
        if not _is_used(address):
            kill_switch(address["AllocationId"])
            _associate(ec2, order, name, address["AllocationId"], _first_interface(order, name, shown))

    _each(give, ranks.items())


def _is_used(address: Shown) -> bool:
    return bool(address.get("AssociationId"))


def _associate(ec2: Any, order: Order, name: str, address: str, interface: str) -> None:
    from botocore.exceptions import ClientError

    with calling(f"giving {name} its address", order.region):
        try:
            asked = {"AllocationId": address, "NetworkInterfaceId": interface, "AllowReassociation": False}
            patiently(partial(ec2.associate_address, **asked), _TOO_NEW, _NEW_S)
        except ClientError as error:
            if code_of(error) not in _NOT_YET and not listing.is_absent(error):  # EC2 learns late of what is new
                raise
            raise Transient(f"aws {order.region}: {name} cannot take an address yet", str(error), "Again.") from error


def _rent(ec2: Any, order: Order, rank: int) -> dict[str, Any]:
    marks = names.tag_list({**order.marks, names.RANK: str(rank)})  # found by them, should the answer be lost
    try:
        with calling("renting a public address", order.region):
            return ec2.allocate_address(Domain="vpc", TagSpecifications=[{"ResourceType": "elastic-ip", "Tags": marks}])
    except QuotaExceeded as error:
        raise _no_addresses(order, error.why) from error


def require_addresses(account: Account, order: Order) -> None:
    """Looks whether the account may rent an address for each machine, before any is made and billed.

    Raises:
        QuotaExceeded: it may not.
        ProviderError: AWS refused, or did not answer.
    """
    limit = account.once(("addresses", order.region), lambda: _most_addresses(account, order.region))
    used = len(listing.addresses(account, order.region, []))
    if used + len(order.ranks) > limit:
        raise _no_addresses(order, f"{used} of {limit:.0f} are rented, {len(order.ranks)} more are needed")


def _most_addresses(account: Account, region: str) -> float:
    """Infinity: nobody says."""
    try:
        with calling("reading the service quotas of EC2", region):
            client = account.client("service-quotas", region)
            quotas = account.pages(client, "list_service_quotas", "Quotas", ServiceCode="ec2")
            return next((each["Value"] for each in quotas if each["QuotaCode"] == _QUOTA), math.inf)
    except PermissionDenied:  # then EC2 says it, later
        return math.inf


def _no_addresses(order: Order, why: str) -> QuotaExceeded:
    return QuotaExceeded(
        f"aws {order.region}: quota {_QUOTA} (EC2-VPC Elastic IPs) is reached",
        f"{why}\na machine with several network cards gets no public address by itself",
        "Raise it, or set `aws: {address: ssm}`, or `address: private` with a `jump_host`, or `network: plain`.",
        scope="region",
    )


def _first_interface(order: Order, name: str, shown: dict[str, Shown]) -> str:
    for each in shown.get(name, {}).get("NetworkInterfaces", ()):
        place_ = each.get("Attachment", {})
        if place_.get("DeviceIndex") == 0 and place_.get("NetworkCardIndex", 0) == 0:
            return each["NetworkInterfaceId"]
    raise Transient(f"aws {order.region}: EC2 does not show the network of {name} yet", "", "Try again.")


def _unless_new(error: Any, name: str) -> None:
    if listing.is_absent(error):
        raise Transient(f"EC2 does not know {name} yet", "it was made just now", "Try again.") from error
    raise error


def _each(call: Callable[[int, str], None], ranks: Iterable[tuple[int, str]]) -> None:
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        list(pool.map(lambda item: call(*item), list(ranks)))  # the list: an error is raised here
