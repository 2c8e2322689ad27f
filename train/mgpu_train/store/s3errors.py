"""What botocore raises, in our words: translated once, here. Nothing of a request (keys, URL userinfo) is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from botocore import exceptions as boto
from urllib3.exceptions import HTTPError

from mgpu_train.store import disk
from mgpu_train.store.base import (
    Ambiguous,
    Changed,
    Damaged,
    Denied,
    Expired,
    NoCredentials,
    NoStore,
    NotFound,
    StoreError,
    Unavailable,
)
from mgpu_train.store.bulk.engine import EXPIRED

_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId", "AuthFailure"}
_FORBIDDEN = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "UnauthorizedAccess", "403", "401"}
_DIGEST = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout", "429"}
_ABSENT = {"NoSuchKey", "NotFound", "404"}
_NO_ANSWER = (
    boto.HTTPClientError,  # reading stopped, the connection was closed, TLS, proxies
    boto.EndpointConnectionError,
    boto.ResponseStreamingError,
    boto.IncompleteReadError,
)
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.ProfileNotFound,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.SSOError,
)


class NoMachineRole(boto.BotoCoreError):
    """The metadata service of this machine does not give its role, which a run's role is taken on with. It may be back
    in a moment."""

    fmt = "the metadata service of this machine does not give the machine's role"


class S3Errors:
    """The translator of one store: `url` is its address, `endpoint` the server's, or None for AWS."""

    def __init__(self, url: str, endpoint: str | None) -> None:
        self.url = url
        self._bucket = urlsplit(url).netloc
        self._server = _host(endpoint) if endpoint else "Amazon S3"

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Turns botocore's errors of the block into StoreErrors; `doing` is what could not be done."""
        try:
            yield
        except (boto.BotoCoreError, boto.ClientError) as error:
            raise self._meaning(f"{self.url}: cannot {doing}", error) from error
        except HTTPError as error:  # as botocore lets it through where the body of a refusal is cut off
            raise self._silent(f"{self.url}: cannot {doing}", type(error).__name__) from error

    def _meaning(self, what: str, error: boto.BotoCoreError | boto.ClientError) -> StoreError:
        if isinstance(error, boto.ClientError):
            return self._answered(what, *_answer(error))
        if isinstance(error, NoMachineRole):
            return Unavailable(f"{what}: {error}. Look whether it has one, and whether 169.254.169.254 answers.")
        if isinstance(error, _NO_CREDENTIALS):
            return NoCredentials(
                f"{what}: no usable credentials. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            )
        if isinstance(error, boto.SSLError):
            return self._untrusted(what)
        if isinstance(error, (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)):
            return self._unreachable(what)
        if isinstance(error, boto.FlexibleChecksumError):
            return Damaged(f"{what}: the bytes that came are not those of the checksum")
        if isinstance(error, _NO_ANSWER):
            return self._silent(what, type(error).__name__)
        if isinstance(error, boto.ParamValidationError):
            return NoStore(f"{what}: {self._bucket!r} is no name of a bucket. Use s3://bucket/prefix.")
        return StoreError(f"{what}: {type(error).__name__}")

    def of_transfer(self, doing: str, told: Mapping[str, Any]) -> StoreError:
        """What a failed task of the transfer process means; `told` is a Failed's."""
        what, kind, text = f"{self.url}: cannot {doing}", told["kind"], told["text"]
        if kind == "http":
            return self._answered(what, told["code"], told["status"], " ".join(text.split())[:300])
        if kind == "tls":
            return self._untrusted(what)
        if kind == "connect":
            return self._unreachable(what)
        if kind == "short":
            return Damaged(f"{what}: {text}")
        if kind == "file":
            return disk.meaning(f"{what}: the file beside it", OSError(told["status"], text))
        if kind == "changed":
            return Changed(f"{what}: the file cannot be sent: {text}. Whoever writes it must have ended before.")
        if kind == "slow":
            return Unavailable(f"{what}: {self._server} is too slow: {text}. Check the network, and try again later.")
        if kind == "bug":
            return StoreError(f"{what}: the process that moves the bytes failed: {text}")
        if kind == "died":
            return Unavailable(f"{what}: the process that moves the bytes failed: {text}. Look for what killed it.")
        return self._silent(what, text)

    def _untrusted(self, what: str) -> StoreError:
        return Unavailable(
            f"{what}: the certificate of {self._server} is not trusted. "
            "Set AWS_CA_BUNDLE to the file of the authority that issued it."
        )

    def _unreachable(self, what: str) -> StoreError:
        return Unavailable(
            f"{what}: no connection to {self._server}. Check the network, and AWS_ENDPOINT_URL where it is set."
        )

    def _silent(self, what: str, how: str) -> StoreError:
        return Unavailable(f"{what}: {self._server} stopped answering ({how}). Try again later.")

    def _answered(self, what: str, code: str, status: int, message: str) -> StoreError:
        told = f"{code}: {message}" if message else code
        if code == "NoSuchBucket":
            return NoStore(
                f"{what}: there is no bucket {self._bucket!r} at {self._server}. Make it, or mend the address."
            )
        if code in _ABSENT:
            return NotFound(f"{what}: there is no such object")
        if code == "NoSuchUpload":
            return StoreError(f"{what}: somebody has ended this upload. Write it again.")
        if code in EXPIRED:
            return Expired(f"{what}: the credentials have expired ({code}). Renew them and start again.")
        if code in _CREDENTIALS:
            return Denied(f"{what}: the credentials are not accepted ({code}). Check AWS_PROFILE or AWS_ACCESS_KEY_ID.")
        if code == "RequestTimeTooSkewed":
            return Denied(f"{what}: this machine's clock is wrong ({code}). Set it, for instance with NTP.")
        if code in _FORBIDDEN or status in (401, 403):
            return Denied(f"{what}: not allowed ({told}). Give these credentials list, read, write and delete here.")
        if code in _DIGEST:
            return Damaged(f"{what}: the bytes that arrived are not those that were sent ({code})")
        if code == "ConditionalRequestConflict" or status == 409:
            return Ambiguous(f"{what}: another write was under way ({told})")
        if code in _BUSY or status in (429, 503) or status >= 500:
            return Unavailable(f"{what}: {self._server} is too busy or broken ({told}). Try again later.")
        if code in ("InvalidBucketName", "PermanentRedirect", "AuthorizationHeaderMalformed"):
            return NoStore(f"{what}: {told}. Check the bucket's name and AWS_REGION.")
        return StoreError(f"{what}: {told}")


def maybe_done(error: StoreError) -> bool:
    """True for a failed request that the server may have carried out all the same."""
    lost = isinstance(error.__cause__, (boto.EndpointConnectionError, boto.ConnectTimeoutError))
    return isinstance(error, Unavailable) and not lost


def _answer(error: boto.ClientError) -> tuple[str, int, str]:
    response: dict[str, Any] = dict(error.response)
    inner = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(inner.get("Code", status)), int(status), " ".join(str(inner.get("Message", "")).split())[:300]


def _host(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
