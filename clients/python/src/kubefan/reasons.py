"""Reasons of errors and gaps. A newer kubefan may have others.

Generated from proto/kubefan/v1alpha1/reasons.yaml by kubefan-codegen.
"""

from __future__ import annotations

from typing import Final

#: The domain of kubefan's reasons in `google.rpc.ErrorInfo`.
ERROR_DOMAIN: Final = "kubefan.dev"


class ErrorReason:
    """Reasons of errors: `KubefanError.reason`."""

    #: "too old resource version: N (M)": history cannot resume from N. M is the oldest version to
    #: resume from. List again, or watch without a version.
    TOO_OLD: Final = "RESOURCE_VERSION_TOO_OLD"
    #: The version is of another history, as after a restore of etcd from a backup. List again, or
    #: watch without a version. Do not compare the new versions with older ones.
    HISTORY_REWRITTEN: Final = "HISTORY_REWRITTEN"
    #: A bad selector, version or target, or an encoding that the resource does not have. Correct
    #: the field that the BadRequest names.
    INVALID_ARGUMENT: Final = "INVALID_ARGUMENT"
    #: The request cannot be decoded. Encode it as watch.proto says.
    MALFORMED_REQUEST: Final = "MALFORMED_REQUEST"
    #: The apiserver does not serve the resource, or no longer. Correct the name, or ask again after
    #: the resource was installed.
    RESOURCE_NOT_FOUND: Final = "RESOURCE_NOT_FOUND"
    #: There is no such object. Take it as the answer.
    OBJECT_NOT_FOUND: Final = "OBJECT_NOT_FOUND"
    #: kubefan is not configured to cache the resource, or not as protobuf; or it cannot be cached,
    #: because its versions do not compare. Read it from the apiserver.
    NOT_CACHED: Final = "NOT_CACHED"
    #: The apiserver denies kubefan the resource. Give kubefan the right to read it.
    UPSTREAM_FORBIDDEN: Final = "UPSTREAM_FORBIDDEN"
    #: kubefan does not know the caller: there is no token, or the apiserver does not accept it, or
    #: the client certificate is not of a trusted CA (`--access=authorized`). Send a valid token or
    #: client certificate.
    UNAUTHENTICATED: Final = "UNAUTHENTICATED"
    #: The caller may not read this, or no longer; the message has the apiserver's words. Also for
    #: requests with `impersonate-*` metadata. Name a namespace in the target, if the caller may
    #: read single namespaces.
    FORBIDDEN: Final = "FORBIDDEN"
    #: The token or client certificate of the stream has expired, an object that the token is bound
    #: to was deleted, or the stream has reached `limits.streamAgeMax`. Resume with a valid token.
    #: Nothing is lost.
    REAUTHENTICATE: Final = "REAUTHENTICATE"
    #: The operator has changed who answers reads of the resource. Resume from the last version.
    #: Nothing is lost.
    SWITCHED: Final = "SWITCHED"
    #: The operator lets the apiserver answer reads of the resource. Retry until that ends, or read
    #: from the apiserver.
    PASSTHROUGH: Final = "PASSTHROUGH"
    #: An operator ended the stream with `kubefan disconnect`. Resume. Nothing is lost.
    DISCONNECTED: Final = "DISCONNECTED"
    #: The resource is not read completely yet. Retry.
    NOT_SYNCED: Final = "NOT_SYNCED"
    #: The state is older than `--max-staleness`. Retry. Another replica may be fresher.
    STALE: Final = "STALE"
    #: This replica has not reached the requested version. Retry. Another replica may be ahead.
    TOO_LARGE: Final = "RESOURCE_VERSION_TOO_LARGE"
    #: The answer needs the apiserver, which cannot be reached. Retry.
    UPSTREAM_UNAVAILABLE: Final = "UPSTREAM_UNAVAILABLE"
    #: The cache of the resource ended. Resume.
    STOPPED: Final = "STOPPED"
    #: kubefan is shutting down. Resume on a new connection.
    DRAINING: Final = "DRAINING"
    #: Nothing has failed. Other replicas have fewer streams. Resume at once, on a new connection.
    REBALANCED: Final = "REBALANCED"
    #: Nothing has failed. The connection has reached `limits.connectionAgeMax`. Resume at once, on
    #: a new connection.
    CONNECTION_AGE: Final = "CONNECTION_AGE"
    #: The call came without TLS to a port that needs it. Use an `https://` address.
    TLS_REQUIRED: Final = "TLS_REQUIRED"
    #: The request did not arrive within 10 s. Send the message of the request with the call.
    REQUEST_TIMEOUT: Final = "REQUEST_TIMEOUT"
    #: The call's own deadline has passed. Allow more time, or end a watch by `timeout_seconds`.
    DEADLINE_EXCEEDED: Final = "DEADLINE_EXCEEDED"
    #: A limit is reached. The message names it. Retry after the delay, which may be longer than
    #: usual.
    LIMIT_REACHED: Final = "LIMIT_REACHED"
    #: The subscriber took less than 16 KiB of a snapshot in `tuning.snapshotStallTimeout`, or after
    #: two of them less than 1 MiB in each on average. Start again, and read faster.
    SNAPSHOT_STALLED: Final = "SNAPSHOT_STALLED"
    #: The request is longer than `limits.maxMessageSize`. Send a shorter selector or projection.
    REQUEST_TOO_LONG: Final = "REQUEST_TOO_LONG"
    #: The call cannot be recorded, and `--audit-log-mode=blocking-strict` demands it. Retry later.
    NOT_RECORDED: Final = "NOT_RECORDED"
    #: The request is compressed. Send requests uncompressed.
    COMPRESSED_REQUEST: Final = "COMPRESSED_REQUEST"
    #: There is no such method. Call one of watch.proto.
    NO_SUCH_METHOD: Final = "NO_SUCH_METHOD"
    #: The watch was not requested as plain gRPC. Call by POST over HTTP/2 with content-type
    #: `application/grpc`.
    NOT_GRPC: Final = "NOT_GRPC"


class GapReason:
    """Reasons of gaps: `GapBegin.reason`."""

    #: The apiserver no longer had the events after the version.
    EXPIRED: Final = "expired"
    #: The apiserver no longer had the next page of a list.
    CONTINUE_EXPIRED: Final = "continue_expired"
    #: The apiserver did not serve the resource for a time.
    NOT_FOUND: Final = "not_found"
    #: The apiserver did not let kubefan read the resource for a time.
    FORBIDDEN: Final = "forbidden"
    #: An event was longer than the limit.
    LINE_TOO_LONG: Final = "line_too_long"
    #: An object could not be parsed.
    BROKEN_OBJECT: Final = "broken_object"
    #: The events were not in order.
    OUT_OF_ORDER: Final = "out_of_order"
    #: The schema or the server's version has changed, so the same objects may have other bytes.
    SCHEMA_CHANGED: Final = "schema_changed"
    #: A comparison with the apiserver found a difference.
    SELF_CHECK: Final = "self_check"
    #: The rest of what was being read is lost, and no version is known to continue from.
    INTERRUPTED: Final = "interrupted"
    #: The kubefan that is upstream sent a catch-up.
    CATCH_UP: Final = "catch_up"
    #: A reason that this kubefan does not know. A newer one, upstream or a replica, has sent it.
    OTHER: Final = "other"


class ErrorMetadata:
    """Keys of `KubefanError.metadata`."""

    #: The version that cannot be resumed from. With RESOURCE_VERSION_TOO_OLD.
    REQUESTED_RESOURCE_VERSION: Final = "requested_resource_version"
    #: The oldest version that can be resumed from. With RESOURCE_VERSION_TOO_OLD.
    OLDEST_RESOURCE_VERSION: Final = "oldest_resource_version"
    #: The version to resume from. Absent if the stream was inside a snapshot, a gap or a catch-up.
    #: With DRAINING, REBALANCED, CONNECTION_AGE.
    RESUME_VERSION: Final = "resume_version"
    #: The apiserver's message while it cannot list the resource, because a conversion webhook is
    #: down for example. With NOT_SYNCED.
    CAUSE: Final = "cause"
