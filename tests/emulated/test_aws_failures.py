"""AWS's errors as mgpu's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from botocore import exceptions as of
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from mgpu import errors
from mgpu.errors import ProviderError
from mgpu.providers.aws.failures import calling, code_of, refusal


def answer(code: str, status: int = 400, message: str = "words", operation: str = "CreateFleet") -> ClientError:
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, operation)  # type: ignore[arg-type]


def translated(error: Exception, *, create: bool = False) -> ProviderError:
    with pytest.raises(ProviderError) as caught, calling("asking", "us-east-1", scope="zone", create=create):
        raise error
    assert caught.value.__cause__ is error
    assert "us-east-1" in caught.value.what
    return caught.value


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        ("InsufficientInstanceCapacity", errors.NoCapacity),
        ("InsufficientHostCapacity", errors.NoCapacity),
        ("InsufficientReservedInstanceCapacity", errors.NoCapacity),
        ("UnfulfillableCapacity", errors.NoCapacity),
        ("InsufficientCapacity", errors.NoCapacity),
        ("Unsupported", errors.NoCapacity),
        ("InsufficientFreeAddressesInSubnet", errors.NoCapacity),
        ("SpotMaxPriceTooLow", errors.BidTooLow),
        ("VcpuLimitExceeded", errors.QuotaExceeded),
        ("InstanceLimitExceeded", errors.QuotaExceeded),
        ("MaxSpotInstanceCountExceeded", errors.QuotaExceeded),
        ("AddressLimitExceeded", errors.QuotaExceeded),
        ("RequestLimitExceeded", errors.RateLimited),
        ("Throttling", errors.RateLimited),
        ("AuthFailure", errors.AuthError),
        ("ExpiredToken", errors.AuthError),
        ("RequestExpired", errors.AuthError),
        ("OptInRequired", errors.AuthError),
        ("RequestTimeTooSkewed", errors.AuthError),
        ("UnauthorizedOperation", errors.PermissionDenied),
        ("Client.UnauthorizedOperation", errors.PermissionDenied),
        ("AccessDeniedException", errors.PermissionDenied),
        ("IdempotentParameterMismatch", errors.Conflict),
        ("PendingVerification", errors.BillingError),
        ("InvalidParameterValue", errors.InvalidRequest),
    ],
)
def test_a_code_is_one_kind_of_error_whether_answered_or_listed(code: str, cls: type[ProviderError]):
    assert type(translated(answer(code))) is cls
    assert type(translated(answer(code), create=True)) is cls
    assert type(refusal(code, "words", "aws us-east-1: asking", scope="zone")) is cls


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        ("InvalidGroup.NotFound", "Mend `aws.security_group_id`."),
        ("InvalidSubnetID.NotFound", "Mend `aws.subnet_ids`."),
        ("InvalidAMIID.Malformed", "Mend `aws.machine_image`."),
        ("InvalidParameterValue", "`mgpu check aws`"),
    ],
)
def test_what_aws_refuses_has_a_next_step_that_names_the_key(code: str, cure: str):
    assert translated(answer(code)).next_step.startswith(cure)


def test_throttling_is_told_from_a_server_that_failed():
    assert type(translated(answer("RequestLimitExceeded", 503))) is errors.RateLimited
    assert translated(answer("SlowDown", 503)).retry_after
    assert type(translated(answer("InsufficientInstanceCapacity", 500), create=True)) is errors.NoCapacity


LOST = [
    answer("InternalError", 500),
    answer("Unavailable", 503),
    answer("502", 502, "Bad Gateway"),
    of.ReadTimeoutError(endpoint_url="x"),
    of.ConnectTimeoutError(endpoint_url="x"),
    of.EndpointConnectionError(endpoint_url="x"),
    of.ConnectionClosedError(endpoint_url="x"),
    of.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    ResponseParserError("no XML"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_answer_is_transient_and_of_a_create_ambiguous(error: Exception):
    assert type(translated(error)) is errors.Transient
    assert type(translated(error, create=True)) is errors.AmbiguousCreate


@pytest.mark.parametrize(
    "error",
    [
        of.NoCredentialsError(),
        of.PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"),
        of.ProfileNotFound(profile="x"),
        of.TokenRetrievalError(provider="sso", error_msg="expired"),
        of.UnauthorizedSSOTokenError(),
    ],
    ids=str,
)
def test_credentials_that_cannot_be_had_are_an_auth_error_with_a_next_step(error: Exception):
    told = translated(error)
    assert type(told) is errors.AuthError
    assert told.next_step


def test_expired_credentials_are_said_to_be_expired():
    told = translated(answer("ExpiredToken"))
    assert "expired" in told.what
    assert "sso login" in told.next_step


def test_a_denial_names_the_action_and_leaves_out_what_nobody_can_read():
    message = (
        "User: arn:aws:iam::1:user/me is not authorized to perform: ec2:RunInstances on resource: x."
        " Encoded authorization failure message: " + "A" * 900
    )
    told = translated(answer("UnauthorizedOperation", 403, message))
    assert "ec2:RunInstances" in told.what
    assert "ec2:RunInstances" in told.next_step
    assert "AAAA" not in str(told)


def test_a_denial_that_names_no_action_names_the_call():
    assert "CreateFleet" in translated(answer("UnauthorizedOperation", 403, "You are not authorized.")).what


@pytest.mark.parametrize(
    ("code", "scope"),
    [("InsufficientInstanceCapacity", "zone"), ("AuthFailure", "account"), ("UnauthorizedOperation", "account")],
)
def test_a_refusal_says_what_it_blocks(code: str, scope: str):
    assert translated(answer(code)).scope == scope


def test_without_a_zone_capacity_blocks_the_offer():
    with pytest.raises(errors.NoCapacity) as caught, calling("asking", "us-east-1"):
        raise answer("InsufficientInstanceCapacity")
    assert caught.value.scope == "offer"


def test_other_errors_pass(capsys: pytest.CaptureFixture[str]):
    def fail(error: Exception) -> Callable[[], None]:
        def raise_it() -> None:
            with calling("asking", "us-east-1"):
                raise error

        return raise_it

    for error in (errors.Transient("ours"), ValueError("a bug")):
        with pytest.raises(type(error)) as caught:
            fail(error)()
        assert caught.value is error


def test_the_code_of_an_error():
    assert code_of(answer("Client.InvalidInstanceID.NotFound")) == "InvalidInstanceID.NotFound"
    assert code_of(ValueError()) == ""
