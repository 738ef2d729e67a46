"""Which failures of a store pass by themselves, how long to try again, and what to tell the user when it is over.

Pure but for the clock: full jitter (a random wait between 0 and a bound that doubles), so that 64 pods that were
slowed down together do not come back together.
"""

from __future__ import annotations

import logging
import mmap
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizer.job import Exit, JobError

log = logging.getLogger("tokenizer")
FIRST_WAIT, LONGEST_WAIT = 0.2, 20.0  # seconds, bounds of the random wait

# One byte shared with forked children: has any S3 call succeeded in this pod? Before, refused credentials are what
# every pod would hit (78); after, they expired or were rotated (75).
_succeeded = mmap.mmap(-1, 1)


class StoreError(JobError):
    """A store said no. `kind`: credentials, denied, bucket, missing, changed, unreachable, endpoint, disk_full, other.

    The code follows from it: 65 for missing and changed objects, 73 for a full disk, 75 for what may pass, 78 for the
    rest as long as no S3 call has succeeded in this pod.
    """

    def __init__(self, kind: str, uri: str, message: str, hint: str = "") -> None:
        code = {"missing": Exit.DATA, "changed": Exit.DATA, "disk_full": Exit.DISK_FULL, "unreachable": Exit.RETRY}.get(
            kind, Exit.RETRY if succeeded() else Exit.CONFIG
        )
        super().__init__(code, f"{uri}: {message}", hint)
        self.kind = kind
        self.uri = uri


class NotFound(StoreError):
    """There is no such object (kind "missing")."""

    def __init__(self, uri: str, message: str = "no such object", hint: str = "check the spelling") -> None:
        super().__init__("missing", uri, message, hint)


def changed(uri: str) -> StoreError:
    return StoreError(
        "changed", uri, "the object changed since it was listed", "`resume` takes it anew, `--skip-file` leaves it out"
    )


def succeeded() -> bool:
    return _succeeded[0] == 1


def note_success() -> None:
    _succeeded[0] = 1


class Fault(NamedTuple):
    """One failed call: a `kind` of StoreError, or "precondition", and words that hold no value of a credential."""

    kind: str
    words: str


# Answers of S3 by code, then by status where the code says nothing (HEAD has no body).
_CODES = {
    "credentials": "InvalidAccessKeyId SignatureDoesNotMatch ExpiredToken ExpiredTokenException InvalidToken "
    "TokenRefreshRequired RequestTimeTooSkewed InvalidClientTokenId UnrecognizedClientException "
    "AuthorizationHeaderMalformed InvalidSecurity",
    "denied": "AccessDenied AllAccessDisabled AccountProblem",
    "bucket": "NoSuchBucket InvalidBucketName PermanentRedirect",
    "missing": "NoSuchKey NoSuchUpload",
    "precondition": "PreconditionFailed InvalidRange",
    "unreachable": "SlowDown SlowDownRead SlowDownWrite RequestTimeout InternalError ServiceUnavailable Throttling "
    "ThrottlingException RequestLimitExceeded OperationAborted ConditionalRequestConflict BadDigest "
    "XAmzContentSHA256Mismatch IncompleteBody BandwidthLimitExceeded",
}
_KIND_OF_CODE = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_KIND_OF_STATUS = {
    401: "credentials",
    403: "denied",
    404: "missing",
    408: "unreachable",
    409: "unreachable",
    412: "precondition",
    416: "precondition",
    429: "unreachable",
    501: "other",
}
# Failures without an answer, by class name along the MRO: naming them so needs no import of the SDK.
_WORDS = {
    "NoCredentialsError": ("credentials", "no credentials found"),
    "PartialCredentialsError": ("credentials", "half of the credentials is missing"),
    "CredentialRetrievalError": ("credentials", "the credentials could not be fetched"),
    "ProfileNotFound": ("credentials", "AWS_PROFILE names a profile that does not exist"),
    "SSOError": ("credentials", "the SSO session is over"),
    "TokenRetrievalError": ("credentials", "the SSO session is over"),
    "ParamValidationError": ("bucket", "not a valid name"),
    "ConnectTimeoutError": ("unreachable", "connecting timed out"),
    "ReadTimeoutError": ("unreachable", "reading timed out"),
    "EndpointConnectionError": ("unreachable", "cannot connect"),
    "ProxyConnectionError": ("unreachable", "cannot connect to the proxy"),
    "ConnectionClosedError": ("unreachable", "connection closed"),
    "IncompleteReadError": ("unreachable", "the body broke off"),
    "ResponseStreamingError": ("unreachable", "the body broke off"),
    "FlexibleChecksumError": ("unreachable", "the body does not match its checksum"),
    "ResponseParserError": ("unreachable", "an answer that is not S3"),
    "HTTPClientError": ("unreachable", "connection broke"),
    "HTTPError": ("unreachable", "connection broke"),
    "HTTPException": ("unreachable", "connection broke"),
    "ConnectionError": ("unreachable", "connection reset"),
    "TimeoutError": ("unreachable", "timed out"),
}


_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "its TLS certificate is not trusted",
    "No such file": "AWS_CA_BUNDLE names a file that does not exist",
    "X509": "AWS_CA_BUNDLE names a file without certificates",
    "WRONG_VERSION_NUMBER": "it speaks no TLS: http:// instead of https://?",
}


def diagnose(error: Exception) -> Fault | None:
    """The fault behind an exception of the S3 client; None for an exception that is not one of its."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict) and "Error" in response:
        code = str(response["Error"].get("Code", ""))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        kind = _KIND_OF_CODE.get(code) or _KIND_OF_STATUS.get(status, "unreachable" if status >= 500 else "other")
        return Fault(kind, f"{status} {code}" if code != str(status) else code)
    names = [cls.__name__ for cls in type(error).__mro__]
    if "SSLError" in names or "SSLCertVerificationError" in names:
        text = str(error)
        for sign, words in _TLS.items():
            if sign in text:
                return Fault("endpoint", words)
        return Fault("unreachable", "TLS failed")
    for name in names:
        if name in _WORDS:
            return Fault(*_WORDS[name])
    if isinstance(error, ValueError) and "endpoint" in str(error).lower():
        return Fault("endpoint", "not a valid endpoint URL")
    return Fault("other", names[0]) if "BotoCoreError" in names else None


def log_retry(line: str) -> None:
    log.warning(line)


class Patience:
    """Decides, after each failure of one operation, how long to wait, or that it is over.

    It runs from the first failure; `progress()` makes the next failure a first one: a download that moves goes on.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        rand: Callable[[], float] = random.random,
    ) -> None:
        self.seconds, self.clock, self.rand = seconds, clock, rand
        self.failures = 0
        self.first_failure = 0.0

    def progress(self) -> None:
        self.failures = 0

    def next_wait(self, seconds: float | None = None) -> float | None:
        """Seconds to wait before the next try; None when `seconds` (default: the patience) are used up."""
        if self.failures == 0:
            self.first_failure = self.clock()
        left = self.first_failure + (self.seconds if seconds is None else seconds) - self.clock()
        if left <= 0:
            return None
        self.failures += 1
        bound = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(self.failures - 1, 10))
        return min(self.rand() * bound, left)
