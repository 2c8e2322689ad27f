"""What AWS and botocore raise, as mgpu's errors: in one place, with the cause kept and the next step named.

capacity (InsufficientInstanceCapacity, UnfulfillableCapacity, Unsupported, ...)   NoCapacity
SpotMaxPriceTooLow                                                                BidTooLow
...LimitExceeded, Max...CountExceeded                                             QuotaExceeded, with the quota's code
no, wrong or expired credentials, a clock that is off                             AuthError
UnauthorizedOperation, AccessDenied                                               PermissionDenied, with the action
throttling                                                                        RateLimited
5xx, time-outs, lost connections                           Transient; of a call that creates: AmbiguousCreate
IdempotentParameterMismatch                                                       Conflict
the account itself                                                                BillingError
all else                                                                          InvalidRequest
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    BidTooLow,
    BillingError,
    Conflict,
    InvalidRequest,
    NoCapacity,
    PermissionDenied,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    Scope,
    Transient,
)
from mgpu.providers.aws import names

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_AUTH = EXPIRED | {
    "AuthFailure",
    "IncompleteSignature",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "OptInRequired",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
# by which a region refuses credentials that others take
_NOT_VALID_THERE = frozenset({"AuthFailure", "InvalidClientTokenId", "OptInRequired", "UnrecognizedClientException"})
_PERMISSION = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
        "NotAuthorized",
        "UnauthorizedOperation",
    }
)
_THROTTLING = frozenset(
    {
        "EC2ThrottledException",
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottledException",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
_CAPACITY = frozenset(
    {
        "InsufficientAddressCapacity",
        "InsufficientCapacity",
        "InsufficientCapacityOnHost",
        "InsufficientFreeAddressesInSubnet",
        "InsufficientHostCapacity",
        "InsufficientInstanceCapacity",
        "InsufficientReservedInstanceCapacity",
        "InsufficientReservedInstancesCapacity",
        "InsufficientVolumeCapacity",
        "InvalidInstanceType",  # not sold there: types come to regions one by one
        "ReservationCapacityExceeded",
        "UnfulfillableCapacity",
        "Unsupported",
        "VolumeTypeNotAvailableInZone",
    }
)
# what is lacking beyond the offer
_WIDE: dict[str, Scope] = {"InsufficientAddressCapacity": "region", "InsufficientFreeAddressesInSubnet": "zone"}
_ACCOUNT = frozenset({"Blocked", "PendingVerification"})
_BROKEN = frozenset(
    {
        "ConcurrentTagAccess",  # somebody else tags it just now
        "InternalError",
        "InternalFailure",
        "RequestTimeout",
        "ServerInternal",
        "ServiceUnavailable",
        "Unavailable",
    }
)
# said under several codes: Unsupported, InvalidFleetConfiguration, InvalidParameterValue
_NOT_SOLD = re.compile(r"not supported in your requested Availability Zone|instance types do not exist")
_QUOTA = re.compile(r"\w*LimitExceeded|Max\w+CountExceeded|ServiceQuotaExceededException|LimitExceededException")
# what such a code is about -> the key of the run file that says it
_KEYS = {
    "InvalidAMIID": "machine_image",
    "InvalidCapacityReservationId": "reservation",
    "InvalidGroup": "security_group_id",
    "InvalidIamInstanceProfile": "instance_profile",
    "InvalidSecurityGroupID": "security_group_id",
    "InvalidSubnet": "subnet_ids",
    "TagPolicyViolation": "tags",
}
_ORGANIZATION = "service control policy"  # in the words of a denial that comes from there
_LOOK_S = 2.0
_RETRY_S = 5.0  # the least that is waited after throttling; botocore has tried again by then
_STATUS_SERVER = 500


def code_of(error: Exception) -> str:
    """The error code of a botocore ClientError, without the side (`Client.`) that old services put before it."""
    answer: Any = getattr(error, "response", {})
    return re.sub(r"^(Client|Server)\.", "", str(answer.get("Error", {}).get("Code", "")))


def of_organization(error: PermissionDenied) -> bool:
    """Whether it is the account's organization that forbids it, to everybody in the account."""
    return _ORGANIZATION in error.why


def of_region(error: AuthError) -> bool:
    """Whether a region may refuse credentials so that are good elsewhere: for some minutes after it was enabled or
    disabled, and always those of a session that STS's global endpoint has begun for regions of old alone."""
    return error.why.partition(":")[0] in _NOT_VALID_THERE


def unless(codes: Collection[str], call: Callable[..., Any], **arguments: Any) -> Any:
    """The answer of AWS; None where it is an error of one of these codes."""
    from botocore.exceptions import ClientError

    try:
        return call(**arguments)
    except ClientError as error:
        if code_of(error) in codes:
            return None
        raise


def patiently(
    call: Callable[[], Any],
    codes: Collection[str],
    within_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """The answer; AWS's errors of these codes are waited out, until `within_s` seconds are over. Then the last one is
    raised."""
    from botocore.exceptions import ClientError

    deadline = clock() + within_s
    while True:
        try:
            return call()
        except ClientError as error:
            if code_of(error) not in codes or clock() >= deadline:
                raise
        sleep(_LOOK_S)


@contextmanager
def calling(what: str, region: str, *, scope: Scope = "region", create: bool = False) -> Iterator[None]:
    """Turns what botocore raises inside into mgpu's errors. `what` is what is being done, as a participle phrase
    ("listing the regions"); `scope` is what a refusal blocks; `create`: the call makes something that costs money.

    Raises:
        ProviderError: one of those in this module's table.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    place = f"aws {region}: {what}" if region else f"aws: {what}"
    try:
        yield
    except ClientError as error:
        raise _of_answer(error, place, scope, create=create) from error
    except (BotoCoreError, ResponseParserError) as error:
        raise _of_botocore(error, place, scope, create=create) from error


def refusal(
    code: str, message: str, place: str, *, scope: Scope, quota: tuple[str, str] | None = None
) -> ProviderError:
    """The error for a code that AWS gave, as an answer or in CreateFleet's list; `quota` is the one that would be
    meant (`quota_of`), `place` says what was done and where."""
    code = re.sub(r"^(Client|Server)\.", "", code)
    why = f"{code}: {_readable(message)}"
    if code in _CAPACITY or _NOT_SOLD.search(message):
        wide = _WIDE.get(code, "zone" if scope == "zone" else "offer")
        return NoCapacity(f"{place}: no capacity ({code})", why, scope=wide)
    if code == "SpotMaxPriceTooLow":
        return BidTooLow(
            f"{place}: the spot price is above the cap", why, "Raise `max_price_usd_per_hour`.", scope="zone"
        )
    if code in _PERMISSION:
        return _denied(why, message, place)
    if code in _THROTTLING:
        return RateLimited(f"{place}: too many calls", why, "Wait a little.", scope=scope, retry_after=_RETRY_S)
    if _QUOTA.fullmatch(code):
        step = "Raise it at Service Quotas in the AWS console."
        return QuotaExceeded(f"{place}: an account limit is reached ({code})", why, step, scope=scope)
    if code in _AUTH:
        return _auth(code, why, place)
    if code in _ACCOUNT:
        return BillingError(f"{place}: the account may not do this now", why, "Ask AWS support.", scope="account")
    if code == "IdempotentParameterMismatch":
        return Conflict(f"{place}: this token was used with other parameters", why, scope=scope)
    if code in _BROKEN:
        return Transient(f"{place}: AWS failed", why, "Try again.", scope=scope)
    return InvalidRequest(f"{place}: AWS refuses ({code})", why, _cure(code), scope=scope)


def _of_answer(error: Any, place: str, scope: Scope, *, create: bool) -> ProviderError:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    message = str(error.response.get("Error", {}).get("Message", ""))
    code = code_of(error)
    if code not in _THROTTLING | _CAPACITY and (status >= _STATUS_SERVER or code in _BROKEN):
        return _lost(f"{code}: {_readable(message)}", place, scope, create=create)
    return refusal(code, f"{message} ({error.operation_name})", place, scope=scope)


def _of_botocore(error: Exception, place: str, scope: Scope, *, create: bool) -> ProviderError:
    from botocore import exceptions as of
    from botocore.parsers import ResponseParserError

    why = f"{type(error).__name__}: {error}"
    if isinstance(error, (of.NoCredentialsError, of.PartialCredentialsError, of.ProfileNotFound)):
        step = "Run `aws configure`, or set AWS_PROFILE or `aws: {profile: ...}`."
        return AuthError(f"{place}: no credentials", why, step, scope="account")
    if isinstance(error, (of.CredentialRetrievalError, of.TokenRetrievalError, of.SSOError, of.LoginError)):
        return AuthError(f"{place}: the credentials cannot be read", why, _LOGIN, scope="account")
    if isinstance(error, (of.HTTPClientError, of.ConnectionError, of.IncompleteReadError, ResponseParserError)):
        return _lost(why, place, scope, create=create)
    return InvalidRequest(
        f"{place}: cannot be asked for", why, "Look at the `aws:` block and AWS_* variables.", scope=scope
    )


_LOGIN = "Log in again (`aws sso login`, or new keys); the next call reads them."


def _lost(why: str, place: str, scope: Scope, *, create: bool) -> ProviderError:
    if create:
        return AmbiguousCreate(f"{place}: the answer was lost", why, scope=scope)
    return Transient(f"{place}: no good answer", why, "Try again; is the network there?", scope=scope)


def _auth(code: str, why: str, place: str) -> AuthError:
    if code in EXPIRED:
        return AuthError(f"{place}: the credentials have expired", why, _LOGIN, scope="account")
    if code == "RequestTimeTooSkewed":
        return AuthError(f"{place}: this computer's clock is wrong", why, "Set the clock (NTP).", scope="account")
    step = "Check the profile and its keys; a region that is not enabled refuses good ones, too."
    return AuthError(f"{place}: AWS does not accept the credentials", why, step, scope="account")


def _denied(why: str, message: str, place: str) -> PermissionDenied:
    named = re.search(r"perform:? ([a-z0-9-]+:[A-Za-z]+)", message)
    if "ServiceLinkedRole" in why:
        action = "iam:CreateServiceLinkedRole"
    else:
        action = named[1] if named else (re.findall(r"\((\w+)\)$", message) or ["this action"])[-1]
    if _ORGANIZATION in message:
        step = "Ask who keeps the organization's policies; where they demand tags: `aws: {tags: {KEY: VALUE}}`."
        return PermissionDenied(f"{place}: the organization forbids {action}", why, step, scope="account")
    flag = " --ssm" if action in (*names.SESSION_LOOKS, names.START_SESSION) else ""
    flag = " --passes" if action.startswith(("ecs:", "logs:")) else flag
    step = f"Allow {action} to whom these credentials belong; `mgpu policy aws{flag}` prints all that is needed."
    return PermissionDenied(f"{place}: not allowed: {action}", why, step, scope="account")


def _cure(code: str) -> str:
    """What may help against a refusal that no other offer would help against."""
    key = next((key for beginning, key in _KEYS.items() if code.startswith(beginning)), "")
    looked_at = "`mgpu check aws` looks at all that a run needs."
    return f"Mend `aws.{key}`. {looked_at}" if key else looked_at


def _readable(message: str) -> str:
    """Without the blob of an encoded authorization failure, which only AWS can read."""
    return re.sub(r"\s*Encoded authorization failure message: \S+", "", message).strip()
