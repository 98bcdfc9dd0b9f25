"""Errors. Each says what is wrong, and what to do about it."""

from __future__ import annotations

from typing import Any, Optional

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from .reasons import ERROR_DOMAIN, ErrorReason

_STATUS_DETAILS = "grpc-status-details-bin"
_Code = grpc.StatusCode
_RETRYABLE = (
    _Code.UNAVAILABLE,
    # Broken streams and proxies in between surface as these.
    _Code.UNKNOWN,
    _Code.INTERNAL,
    _Code.CANCELLED,
    _Code.ABORTED,
    _Code.DEADLINE_EXCEEDED,
)


class KubefanError(Exception):
    """A call failed.

    Attributes:
        message: The problem.
        code: The gRPC status code.
        reason: kubefan's stable reason, such as `RESOURCE_VERSION_TOO_LARGE`. Empty if another
            server or the gRPC library made the error.
        field: The invalid field of the request, such as `target.namespace`; empty if there is none.
        metadata: More about the reason.
        retry_after: The delay in seconds that the server asks for before a retry, or None.
        remedy: The advice, or empty. It is a part of `str(error)`.
    """

    remedy = ""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = _Code.UNKNOWN,
        reason: str = "",
        field: str = "",
        metadata: Optional[dict[str, str]] = None,
        retry_after: Optional[float] = None,
    ) -> None:
        super().__init__(f"{message}; {self.remedy}" if self.remedy else message)
        self.message = message
        self.code = code
        self.reason = reason
        self.field = field
        self.metadata = metadata or {}
        self.retry_after = retry_after

    @property
    def is_retryable(self) -> bool:
        """Whether a retry of the same call may succeed."""
        return self.retry_after is not None or self.code in _RETRYABLE


class InvalidAddress(KubefanError, ValueError):
    """The address, the CA file, the certificate or the token is invalid."""

    @property
    def is_retryable(self) -> bool:
        """Never."""
        return False


class Unreachable(KubefanError):
    """There is no connection, it broke, or there was no complete answer in time.

    In time is the `timeout` of a list or a get; when it is over, `code` is `DEADLINE_EXCEEDED`.
    """

    @property
    def is_retryable(self) -> bool:
        """Always."""
        return True


class Expired(KubefanError):
    """History cannot resume from the version: it is too old, or of another history."""

    remedy = "list again, or watch without a resource_version"


class NotFound(KubefanError):
    """There is no such object, or the apiserver does not serve the resource."""


class NotCached(KubefanError):
    """kubefan is not configured to cache the resource."""

    remedy = "add it to kubefan serve --resource, or read it from the apiserver"


class InvalidArgument(KubefanError, ValueError):
    """A selector, version or target is invalid: `field` names it."""


class Unauthenticated(KubefanError):
    """kubefan does not know the caller."""

    remedy = "give a valid token, token_file or client certificate"


class Forbidden(KubefanError):
    """The caller may not read this, or the apiserver denies it to kubefan."""


class Unavailable(KubefanError):
    """kubefan cannot answer now: it is not synced, lags, or drains. A retry may succeed."""


class LimitReached(KubefanError):
    """A limit of the server is reached, or the request is too long."""


class Undecodable(KubefanError):
    """A message was damaged, or does not fit the client's state. A watch asks for it again."""

    @property
    def is_retryable(self) -> bool:
        """Always."""
        return True


class ProtocolError(KubefanError):
    """The server does not speak kubefan's protocol."""

    @property
    def is_retryable(self) -> bool:
        """Never."""
        return False


class Stopped(KubefanError):
    """The informer has been stopped, which is final."""

    @property
    def is_retryable(self) -> bool:
        """Never."""
        return False


_BY_CODE: dict[grpc.StatusCode, type[KubefanError]] = {
    _Code.NOT_FOUND: NotFound,
    _Code.FAILED_PRECONDITION: NotCached,
    _Code.INVALID_ARGUMENT: InvalidArgument,
    _Code.UNAUTHENTICATED: Unauthenticated,
    _Code.PERMISSION_DENIED: Forbidden,
    _Code.UNAVAILABLE: Unavailable,
    _Code.RESOURCE_EXHAUSTED: LimitReached,
}


def from_rpc(error: Any, address: str) -> KubefanError:
    """The error of a failed call. `error` is a `grpc.RpcError` of a sync or an asyncio call."""
    code: grpc.StatusCode = error.code()
    message: str = error.details() or code.name
    info, retry_after, field = _details(error.trailing_metadata())
    if info is not None and info.reason == ErrorReason.TLS_REQUIRED:
        needs_tls = "the server needs TLS on this port; use an https:// address"
        return Unreachable(f"cannot reach kubefan at {address}: {needs_tls}", code=code)
    if info is None:
        if code == _Code.UNAVAILABLE and retry_after is None:
            return Unreachable(f"cannot reach kubefan at {address}: {_cause(message)}", code=code)
        if code == _Code.UNIMPLEMENTED and "404" in message:
            port = "that port does not serve gRPC (HTTP status 404); is it kubefan's admin port?"
            return ProtocolError(
                f"{address} does not speak kubefan's protocol: {port}", code=_Code.INTERNAL
            )
    reason = info.reason if info is not None else ""
    kind = _BY_CODE.get(code, KubefanError)
    # The gRPC library uses the same code for a message that is too long, but without a reason.
    if code == _Code.OUT_OF_RANGE and reason:
        kind = Expired
    return kind(
        message,
        code=code,
        reason=reason,
        field=field,
        metadata=dict(info.metadata) if info is not None else {},
        retry_after=retry_after,
    )


def from_call(error: Any, address: str, seconds: float) -> KubefanError:
    """As `from_rpc`, for a call with a limit of this many seconds."""
    made = from_rpc(error, address)
    # The server knows the client's limit, and either may notice first that it is over. The server
    # has one of its own, too, with another reason.
    if made.code == _Code.DEADLINE_EXCEEDED and made.reason in ("", ErrorReason.DEADLINE_EXCEEDED):
        problem = f"no complete answer from kubefan at {address} within {seconds:g} s"
        return Unreachable(problem, code=made.code, reason=made.reason)
    return made


def _details(metadata: Any) -> tuple[Any, Optional[float], str]:
    """The ErrorInfo of kubefan or None, the delay before a retry, and the invalid field."""
    info, retry_after, field = None, None, ""
    for key, value in metadata or ():
        if key != _STATUS_DETAILS:
            continue
        try:
            details = status_pb2.Status.FromString(value).details
            for detail in details:
                if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                    found = error_details_pb2.ErrorInfo.FromString(detail.value)
                    info = found if found.domain == ERROR_DOMAIN else info
                elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                    delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                    retry_after = max(0.0, delay.seconds + delay.nanos / 1e9)
                elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                    bad = error_details_pb2.BadRequest.FromString(detail.value)
                    field = bad.field_violations[0].field if bad.field_violations else ""
        except DecodeError:
            continue
    return info, retry_after, field


#: What is in a message of the gRPC library, and what it means.
_CAUSES = {
    "CERTIFICATE_VERIFY_FAILED": "no trusted CA has signed the server's certificate; "
    "ca_file must contain the CA that has",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS; use an address without https://",
    "Connection refused": "Connection refused",
    "Connection reset by peer": "Connection reset by peer",
    "No such file or directory": "No such file or directory",
    "Network is unreachable": "Network is unreachable",
    "Socket closed": "Socket closed",
}


def _cause(message: str) -> str:
    """The system's reason in a message of the gRPC library, which lists every attempt."""
    return next((text for sign, text in _CAUSES.items() if sign in message), message)
