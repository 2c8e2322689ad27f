"""One gang made, by a token, all or nothing: launch template, CreateFleet, then what a machine gets once it exists.

    launch template      holds the one-use host key and the hard cap of the first try; a second try by the same token
                         finds it and asks for the same machines
    placement group
    CreateFleet          its ClientToken is the token: a call whose answer was lost is made again and makes nothing more
    tags with the ranks
    kill switch          at the hard cap; the machine's own clock runs from its boot on, whatever happens here
    public addresses     where EC2 gives none by itself, once the machines run

A crash anywhere leaves machines that carry their owner and their hard cap, and end themselves. A refusal for good
leaves none: what was made is ended before it is raised.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    CleanupFailed,
    Conflict,
    NoCapacity,
    PermissionDenied,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    Transient,
)
from mgpu.providers.aws import names
from mgpu.providers.aws.catalog import quotas
from mgpu.providers.aws.catalog.spot_price import spot_price
from mgpu.providers.aws.failures import calling, code_of, of_region, refusal
from mgpu.providers.aws.instances import equip, listing, machine_image, machines, network, teardown
from mgpu.providers.aws.instances.fleet_request import Order, fleet, for_nothing, template
from mgpu.providers.aws.session import Account
from mgpu.providers.base import Handle, Intent
from mgpu.providers.start import HostKey
from mgpu.words import utc

_Marks = dict[str, str]
_PASSING = (RateLimited, Transient)  # the same call again may do better, and loses nothing
_TOO_NEW = re.compile(r"InvalidLaunchTemplate|InvalidPlacementGroup|Invalid IAM Instance Profile")  # not known yet
_OF_MACHINES = ("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded")


def launch(account: Account, order: Order) -> Handle:
    """Makes the gang, or goes on where an earlier try by the same token has stopped. `ids` has a place for every rank
    of the fleet, empty for those that were not asked for.

    Raises:
        Conflict: the token was used for something else.
        NoCapacity, BidTooLow, QuotaExceeded, NoOffer: nothing was made.
        AuthError, PermissionDenied: nothing was made; of scope region where other regions may say otherwise.
        Transient, RateLimited: call again with the same token; something may have been made.
        CleanupFailed: something was made that could not be ended.
        ProviderError: nothing was made.
    """
    _require_begun(order)
    with _of_its_region(account, order):
        network.require_enabled(account, order.region)
        known = _known(account, order)
        made = machines.find(account, _intent(order))
        if known is None and made is not None:
            return _handle(order, made.ids, made.made_at)  # ended: its template went last
        if known is None or made is None or not all(_at(made.ids, rank) for rank in order.ranks):
            known, ids = _make(account, order, known)
            made = _handle(order, _ranked(order, ids), time.time())
    try:
        equip.finish(account, order, made, hard_cap_at=float(known[names.HARD_CAP_AT]))
    except _PASSING:
        raise
    except ProviderError as error:
        _end(account, order, [name for name in made.ids if name], error)
        raise
    return _handle(order, made.ids, made.made_at)


@contextmanager
def _of_its_region(account: Account, order: Order) -> Iterator[None]:
    """Whoever may rent nothing here may do so elsewhere, as long as nothing was made: policies name regions, and one
    that was enabled a moment ago takes no credentials yet."""
    try:
        yield
    except PermissionDenied as error:
        if "ServiceLinkedRole" not in error.why:  # a role of the whole account
            error.scope = "region"
        raise
    except AuthError as error:
        if of_region(error) and order.region in account.opted_in():
            error.scope = "region"
        raise


def recall(account: Account, order: Order) -> Handle | None:
    """What EC2 has made by this order's token, by CreateFleet's own word, which comes minutes before listings show
    machines. None: nothing, and nothing ever: the token is used up.

    First the token is used for a call that asks for the same at a price for which there is nothing. Where EC2 knows it,
    that is refused (IdempotentParameterMismatch), and only then the first call is repeated, which makes no second gang:
    https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html. In a reservation there are no prices, and
    a machine costs nothing more.

    Raises:
        ProviderError: there is no such word.
    """
    from botocore.exceptions import ClientError

    ec2 = account.client("ec2", order.region)
    asked = fleet(order, _subnet(account, order, _known(account, order)))
    with calling(f"{order.what}, asked once more what came of it", order.region, scope="zone"):
        again = order.offer.reservation is not None
        try:
            answer = ec2.create_fleet(**(asked if again else for_nothing(asked)))
        except ClientError as error:
            if code_of(error) != "IdempotentParameterMismatch":
                raise
            again, answer = True, ec2.create_fleet(**asked)
    ids = _ids(answer)
    if again and not ids and not answer.get("Errors"):
        raise _not_yet(order)
    return _handle(order, _ranked(order, ids), time.time()) if ids else None


def _not_yet(order: Order) -> Transient:
    return Transient(f"aws: {order.what}: EC2 does not say yet what came of it", "", "Try again.")


def _ids(answer: dict[str, Any]) -> list[str]:
    return [name for each in answer.get("Instances", ()) for name in each.get("InstanceIds", ())]


def _require_begun(order: Order) -> None:
    """Raises NoCapacity: the reservation has not begun, which waiting mends."""
    reserved = order.offer.reservation
    if reserved and reserved.state != "active":
        at = utc(reserved.begins_at)
        what = f"aws {order.region}: {order.what}: it is {reserved.state}, and begins {at}"
        raise NoCapacity(what, "", f"Launch after {at}.", scope="zone")


def _make(account: Account, order: Order, known: _Marks | None) -> tuple[_Marks, list[str]]:
    """The template's tags, and the ids of the machines that EC2 has made by this order's token, now or before."""
    if known is None:
        where = network.find(account, order.options, order.offer, len(order.ranks))
        with _discarding(account, order):
            known = _prepare(account, order, where)
    subnet_id = _subnet(account, order, known)
    with _discarding(account, order):
        return known, _ask(account, order, subnet_id)


@contextmanager
def _discarding(account: Account, order: Order) -> Iterator[None]:
    """Where it is refused for good, takes away what there is of the order."""
    try:
        yield
    except (*_PASSING, Conflict, CleanupFailed):
        raise
    except ProviderError:
        _discard(account, order)
        raise


def _subnet(account: Account, order: Order, known: _Marks | None) -> str:
    """The one that the first try has chosen. Chosen anew it may be another one: the gang that was made has taken
    addresses, and the same token with another subnet is a conflict."""
    chosen = (known or {}).get(names.SUBNET)  # an earlier version's templates do not say it
    return chosen or network.find(account, order.options, order.offer, len(order.ranks)).subnet_id


def _known(account: Account, order: Order) -> _Marks | None:
    """The tags of the launch template that an earlier try has made."""
    found = listing.templates(account, order.region, order.name)["LaunchTemplates"]
    if not found:
        return None
    marks = listing.tags_of(found[0])
    if marks.get(names.REQUEST) != order.digest:
        raise Conflict(
            f"aws {order.region}: launch template {order.name} was made for another request",
            "the same token was used with other parameters",
            "Use another token.",
        )
    return marks


def _prepare(account: Account, order: Order, where: network.Place) -> _Marks:
    """Makes the launch template and, for several machines, the placement group that it names; the template's tags."""
    from botocore.exceptions import ClientError

    kind = network.kind(account, order.region, order.offer.instance_type)
    if order.wants_address(kind):
        equip.require_addresses(account, order)
    chosen = machine_image.find(account, order.options, order.region)
    hard_cap_at = _hard_cap_at(order)
    usd = spot_price(account, order.region, where.zone, order.offer.instance_type) if order.market == "spot" else None
    usd = order.offer.price_usd_per_hour if usd is None else usd
    data = template(order, where, kind, chosen, HostKey.make(), hard_cap_at, usd)
    own = {names.REQUEST: order.digest, names.HARD_CAP_AT: str(hard_cap_at), names.SUBNET: where.subnet_id}
    marks = {**order.marks, **own}
    ec2 = account.client("ec2", order.region)
    if order.clustered(kind):
        _group(ec2, order)
    with calling(f"making launch template {order.name}", order.region):
        try:
            ec2.create_launch_template(
                LaunchTemplateName=order.name,
                LaunchTemplateData=data,
                TagSpecifications=[{"ResourceType": "launch-template", "Tags": names.tag_list(marks)}],
            )
            return marks
        except ClientError as error:
            if not code_of(error).startswith("InvalidLaunchTemplateName.AlreadyExists"):
                raise
            # another process, or an earlier call whose answer was lost: its host key and its hard cap count
            known = _known(account, order)
            if known is None:
                why = f"{order.name} exists, EC2 does not show it yet"
                raise Transient(f"aws {order.region}: a launch template is too new", why, "Try again.") from error
            return known


def _hard_cap_at(order: Order) -> int:
    """UNIX seconds; however long it took to come here, before AWS itself ends the machines of a Capacity Block."""
    at, reserved = math.ceil(time.time() + order.request.hard_cap_s), order.offer.reservation
    return min(at, math.floor(reserved.machines_end_at)) if reserved and reserved.machines_end_at else at


def _group(ec2: Any, order: Order) -> None:
    from botocore.exceptions import ClientError

    marks = [{"ResourceType": "placement-group", "Tags": names.tag_list(order.marks)}]
    with calling(f"making placement group {order.name}", order.region):
        try:
            ec2.create_placement_group(GroupName=order.name, Strategy="cluster", TagSpecifications=marks)
        except ClientError as error:
            if code_of(error) != "InvalidPlacementGroup.Duplicate":
                raise


def _ask(account: Account, order: Order, subnet_id: str) -> list[str]:
    from botocore.exceptions import ClientError

    ec2, asked = account.client("ec2", order.region), fleet(order, subnet_id)
    try:
        with calling(order.what, order.region, scope="zone", create=True):
            try:
                answer = ec2.create_fleet(**asked)
            except ClientError as error:
                if not listing.is_absent(error):
                    raise
                raise Transient(f"aws: {order.what}: EC2 does not see all of it yet", str(error), "Again.") from error
    except AmbiguousCreate as error:  # the token makes the same call safe, and it alone finishes what was begun
        raise Transient(error.what, error.why, "The same call finds what was made.", scope="zone") from error
    except QuotaExceeded as error:
        raise _quota(order, error.why) from error
    ids = _ids(answer)
    errors = answer.get("Errors", ())
    if len(ids) < len(order.ranks):
        if not ids and not errors:
            raise _not_yet(order)
        refused = _refused(order, errors, len(ids))
        _end(account, order, ids, refused)
        raise refused
    return ids


def _refused(order: Order, errors: Sequence[dict[str, Any]], granted: int) -> ProviderError:
    """The most telling one of CreateFleet's errors, one for each pool and reason. Its token is spent: what would pass
    with a new call counts as no capacity."""
    where = f"aws {order.region}: {order.what}"
    reasons = [
        refusal(each.get("ErrorCode", "unknown"), each.get("ErrorMessage", ""), where, scope="zone") for each in errors
    ]
    telling = [
        each
        for each in reasons
        if not isinstance(each, (NoCapacity, *_PASSING, Conflict, AmbiguousCreate)) and not _TOO_NEW.search(each.why)
    ]
    if telling:
        return _quota(order, telling[0].why) if isinstance(telling[0], QuotaExceeded) else telling[0]
    why = "\n".join(dict.fromkeys(each.why for each in reasons)) or f"{granted} of {len(order.ranks)} were granted"
    codes = ", ".join(dict.fromkeys(each.get("ErrorCode", "unknown") for each in errors)) or "fewer were granted"
    return NoCapacity(f"{where}: no capacity ({codes})", why, "Allow other zones, types or regions.", scope="zone")


def _quota(order: Order, why: str) -> QuotaExceeded:
    counted = why.startswith(_OF_MACHINES)  # there are limits of fleets and disks, too
    quota = quotas.quota_of(order.offer.instance_type, order.offer.market) if counted else None
    named = f"quota {quota.code} ({quota.name})" if quota else "an account limit"
    raise_it = f"`{quotas.raise_command(quota.code, order.region)} VCPUS`" if quota else "see Service Quotas"
    return QuotaExceeded(
        f"aws {order.region}: {order.what}: {named} is reached",
        why,
        f"Raise it ({raise_it}), or allow another family, market or region.",
        scope="region",
    )


def _end(account: Account, order: Order, ids: Sequence[str], refusal: ProviderError) -> None:
    """Ends machines of a gang that is not to be, and gives their addresses back. Returns when EC2 says that they are on
    their way out. Raises CleanupFailed, because of the `refusal`: it does not."""
    if not ids:
        return
    try:
        with calling(f"ending {', '.join(ids)}", order.region):
            account.client("ec2", order.region).terminate_instances(InstanceIds=list(ids))
        if not teardown.release(account, order.region, listing.tag_filters({names.TOKEN: order.token})):
            raise Transient(f"aws {order.region}: an address is still in use", "", "Try again.")
    except _PASSING:
        raise
    except ProviderError as error:
        if "NotFound" in error.why:  # too new to be shown: the same create comes here again
            raise Transient(error.what, error.why, "Try again.") from error
        why, step = str(error), "Run `mgpu gc`; whatever happens, the machines end at their hard cap."
        raise CleanupFailed(f"aws {order.region}: {', '.join(ids)} could not be ended", why, step) from refusal


def _discard(account: Account, order: Order) -> None:
    """Takes away what a refused order has left, none of which costs anything. Machines on their way out may still hold
    the group: then the template stays, too, and the end of the fleet finds both by it."""
    ec2 = account.client("ec2", order.region)
    try:
        with calling(f"discarding {order.name}", order.region):
            with listing.unless_absent():
                ec2.delete_placement_group(GroupName=order.name)
            with listing.unless_absent():
                ec2.delete_launch_template(LaunchTemplateName=order.name)
    except ProviderError:
        return


def _intent(order: Order) -> Intent:
    request = order.request
    return Intent(
        fleet=request.fleet,
        generation=request.generation,
        owner=request.owner,
        token=order.token,
        offer=order.offer,
    )


def _ranked(order: Order, ids: Sequence[str]) -> tuple[str, ...]:
    """Ids by rank; in alphabetical order, as any process would put them that finds them without ranks."""
    by_rank = dict(zip(sorted(order.ranks), sorted(ids), strict=False))
    return tuple(by_rank.get(rank, "") for rank in range(order.request.requirements.nodes))


def _at(ids: Sequence[str], rank: int) -> str:
    return ids[rank] if rank < len(ids) else ""


def _handle(order: Order, ids: Sequence[str], made_at: float) -> Handle:
    request = order.request
    return Handle(
        provider="aws",
        region=order.region,
        fleet=request.fleet,
        generation=request.generation,
        token=order.token,
        ids=tuple(_at(ids, rank) for rank in range(max(request.requirements.nodes, len(ids)))),
        made_at=made_at,
    )
