//! The texts of the contract that are closed sets. Generated from
//! `proto/kubefan/v1alpha1/reasons.yaml`.

use std::time::Duration;

use tonic::Code;

/// The domain of the reasons: `google.rpc.ErrorInfo.domain`.
pub const ERROR_DOMAIN: &str = "kubefan.dev";

/// A reason of an error: `google.rpc.ErrorInfo.reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorReason {
    /// "too old resource version: N (M)": history cannot resume from N. M is the oldest version to
    /// resume from. List again, or watch without a version.
    TooOld,
    /// The version is of another history, as after a restore of etcd from a backup. List again, or
    /// watch without a version. Do not compare the new versions with older ones.
    HistoryRewritten,
    /// A bad selector, version or target, or an encoding that the resource does not have. Correct
    /// the field that the BadRequest names.
    InvalidArgument,
    /// The request cannot be decoded. Encode it as watch.proto says.
    MalformedRequest,
    /// The apiserver does not serve the resource, or no longer. Correct the name, or ask again
    /// after the resource was installed.
    ResourceNotFound,
    /// There is no such object. Take it as the answer.
    ObjectNotFound,
    /// kubefan is not configured to cache the resource, or not as protobuf; or it cannot be cached,
    /// because its versions do not compare. Read it from the apiserver.
    NotCached,
    /// The apiserver denies kubefan the resource. Give kubefan the right to read it.
    UpstreamForbidden,
    /// kubefan does not know the caller: there is no token, or the apiserver does not accept it, or
    /// the client certificate is not of a trusted CA (`--access=authorized`). Send a valid token or
    /// client certificate.
    Unauthenticated,
    /// The caller may not read this, or no longer; the message has the apiserver's words. Also for
    /// requests with `impersonate-*` metadata. Name a namespace in the target, if the caller may
    /// read single namespaces.
    Forbidden,
    /// The token or client certificate of the stream has expired, an object that the token is bound
    /// to was deleted, or the stream has reached `limits.streamAgeMax`. Resume with a valid token.
    /// Nothing is lost.
    Reauthenticate,
    /// The operator has changed who answers reads of the resource. Resume from the last version.
    /// Nothing is lost.
    Switched,
    /// The operator lets the apiserver answer reads of the resource. Retry until that ends, or read
    /// from the apiserver.
    Passthrough,
    /// An operator ended the stream with `kubefan disconnect`. Resume. Nothing is lost.
    Disconnected,
    /// The resource is not read completely yet. Retry.
    NotSynced,
    /// The state is older than `--max-staleness`. Retry. Another replica may be fresher.
    Stale,
    /// This replica has not reached the requested version. Retry. Another replica may be ahead.
    TooLarge,
    /// The answer needs the apiserver, which cannot be reached. Retry.
    UpstreamUnavailable,
    /// The cache of the resource ended. Resume.
    Stopped,
    /// kubefan is shutting down. Resume on a new connection.
    Draining,
    /// Nothing has failed. Other replicas have fewer streams. Resume at once, on a new connection.
    Rebalanced,
    /// Nothing has failed. The connection has reached `limits.connectionAgeMax`. Resume at once, on
    /// a new connection.
    ConnectionAge,
    /// The call came without TLS to a port that needs it. Use an `https://` address.
    TlsRequired,
    /// The request did not arrive within 10 s. Send the message of the request with the call.
    RequestTimeout,
    /// The call's own deadline has passed. Allow more time, or end a watch by `timeout_seconds`.
    DeadlineExceeded,
    /// A limit is reached. The message names it. Retry after the delay, which may be longer than
    /// usual.
    LimitReached,
    /// The subscriber took less than 16 KiB of a snapshot in `tuning.snapshotStallTimeout`, or
    /// after two of them less than 1 MiB in each on average. Start again, and read faster.
    SnapshotStalled,
    /// The request is longer than `limits.maxMessageSize`. Send a shorter selector or projection.
    RequestTooLong,
    /// The call cannot be recorded, and `--audit-log-mode=blocking-strict` demands it. Retry later.
    NotRecorded,
    /// The request is compressed. Send requests uncompressed.
    CompressedRequest,
    /// There is no such method. Call one of watch.proto.
    NoSuchMethod,
    /// The watch was not requested as plain gRPC. Call by POST over HTTP/2 with content-type
    /// `application/grpc`.
    NotGrpc,
}

impl ErrorReason {
    /// Every reason.
    pub const ALL: &[Self] = &[
        Self::TooOld,
        Self::HistoryRewritten,
        Self::InvalidArgument,
        Self::MalformedRequest,
        Self::ResourceNotFound,
        Self::ObjectNotFound,
        Self::NotCached,
        Self::UpstreamForbidden,
        Self::Unauthenticated,
        Self::Forbidden,
        Self::Reauthenticate,
        Self::Switched,
        Self::Passthrough,
        Self::Disconnected,
        Self::NotSynced,
        Self::Stale,
        Self::TooLarge,
        Self::UpstreamUnavailable,
        Self::Stopped,
        Self::Draining,
        Self::Rebalanced,
        Self::ConnectionAge,
        Self::TlsRequired,
        Self::RequestTimeout,
        Self::DeadlineExceeded,
        Self::LimitReached,
        Self::SnapshotStalled,
        Self::RequestTooLong,
        Self::NotRecorded,
        Self::CompressedRequest,
        Self::NoSuchMethod,
        Self::NotGrpc,
    ];

    /// The text on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TooOld => "RESOURCE_VERSION_TOO_OLD",
            Self::HistoryRewritten => "HISTORY_REWRITTEN",
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::MalformedRequest => "MALFORMED_REQUEST",
            Self::ResourceNotFound => "RESOURCE_NOT_FOUND",
            Self::ObjectNotFound => "OBJECT_NOT_FOUND",
            Self::NotCached => "NOT_CACHED",
            Self::UpstreamForbidden => "UPSTREAM_FORBIDDEN",
            Self::Unauthenticated => "UNAUTHENTICATED",
            Self::Forbidden => "FORBIDDEN",
            Self::Reauthenticate => "REAUTHENTICATE",
            Self::Switched => "SWITCHED",
            Self::Passthrough => "PASSTHROUGH",
            Self::Disconnected => "DISCONNECTED",
            Self::NotSynced => "NOT_SYNCED",
            Self::Stale => "STALE",
            Self::TooLarge => "RESOURCE_VERSION_TOO_LARGE",
            Self::UpstreamUnavailable => "UPSTREAM_UNAVAILABLE",
            Self::Stopped => "STOPPED",
            Self::Draining => "DRAINING",
            Self::Rebalanced => "REBALANCED",
            Self::ConnectionAge => "CONNECTION_AGE",
            Self::TlsRequired => "TLS_REQUIRED",
            Self::RequestTimeout => "REQUEST_TIMEOUT",
            Self::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Self::LimitReached => "LIMIT_REACHED",
            Self::SnapshotStalled => "SNAPSHOT_STALLED",
            Self::RequestTooLong => "REQUEST_TOO_LONG",
            Self::NotRecorded => "NOT_RECORDED",
            Self::CompressedRequest => "COMPRESSED_REQUEST",
            Self::NoSuchMethod => "NO_SUCH_METHOD",
            Self::NotGrpc => "NOT_GRPC",
        }
    }
}

impl PartialEq<ErrorReason> for str {
    fn eq(&self, reason: &ErrorReason) -> bool {
        *self == *reason.as_str()
    }
}

impl PartialEq<ErrorReason> for &str {
    fn eq(&self, reason: &ErrorReason) -> bool {
        **self == *reason.as_str()
    }
}

impl PartialEq<ErrorReason> for String {
    fn eq(&self, reason: &ErrorReason) -> bool {
        *self == *reason.as_str()
    }
}

impl ErrorReason {
    /// The status code that comes with the reason.
    pub const fn code(self) -> Code {
        match self {
            Self::TooOld => Code::OutOfRange,
            Self::HistoryRewritten => Code::OutOfRange,
            Self::InvalidArgument => Code::InvalidArgument,
            Self::MalformedRequest => Code::InvalidArgument,
            Self::ResourceNotFound => Code::NotFound,
            Self::ObjectNotFound => Code::NotFound,
            Self::NotCached => Code::FailedPrecondition,
            Self::UpstreamForbidden => Code::PermissionDenied,
            Self::Unauthenticated => Code::Unauthenticated,
            Self::Forbidden => Code::PermissionDenied,
            Self::Reauthenticate => Code::Unavailable,
            Self::Switched => Code::Unavailable,
            Self::Passthrough => Code::Unavailable,
            Self::Disconnected => Code::Unavailable,
            Self::NotSynced => Code::Unavailable,
            Self::Stale => Code::Unavailable,
            Self::TooLarge => Code::Unavailable,
            Self::UpstreamUnavailable => Code::Unavailable,
            Self::Stopped => Code::Unavailable,
            Self::Draining => Code::Unavailable,
            Self::Rebalanced => Code::Unavailable,
            Self::ConnectionAge => Code::Unavailable,
            Self::TlsRequired => Code::Unavailable,
            Self::RequestTimeout => Code::DeadlineExceeded,
            Self::DeadlineExceeded => Code::DeadlineExceeded,
            Self::LimitReached => Code::ResourceExhausted,
            Self::SnapshotStalled => Code::ResourceExhausted,
            Self::RequestTooLong => Code::ResourceExhausted,
            Self::NotRecorded => Code::Internal,
            Self::CompressedRequest => Code::Unimplemented,
            Self::NoSuchMethod => Code::Unimplemented,
            Self::NotGrpc => Code::Unimplemented,
        }
    }

    /// The delay before a retry: `google.rpc.RetryInfo.retry_delay`.
    /// `None` if a retry cannot succeed by itself.
    pub const fn retry_delay(self) -> Option<Duration> {
        match self {
            Self::TooOld => None,
            Self::HistoryRewritten => None,
            Self::InvalidArgument => None,
            Self::MalformedRequest => None,
            Self::ResourceNotFound => None,
            Self::ObjectNotFound => None,
            Self::NotCached => None,
            Self::UpstreamForbidden => None,
            Self::Unauthenticated => None,
            Self::Forbidden => None,
            Self::Reauthenticate => Some(Duration::from_secs(1)),
            Self::Switched => Some(Duration::from_secs(1)),
            Self::Passthrough => Some(Duration::from_secs(1)),
            Self::Disconnected => Some(Duration::from_secs(1)),
            Self::NotSynced => Some(Duration::from_secs(1)),
            Self::Stale => Some(Duration::from_secs(1)),
            Self::TooLarge => Some(Duration::from_secs(1)),
            Self::UpstreamUnavailable => Some(Duration::from_secs(1)),
            Self::Stopped => Some(Duration::from_secs(1)),
            Self::Draining => Some(Duration::from_secs(1)),
            Self::Rebalanced => Some(Duration::from_secs(0)),
            Self::ConnectionAge => Some(Duration::from_secs(0)),
            Self::TlsRequired => None,
            Self::RequestTimeout => None,
            Self::DeadlineExceeded => None,
            Self::LimitReached => Some(Duration::from_secs(1)),
            Self::SnapshotStalled => Some(Duration::from_secs(1)),
            Self::RequestTooLong => None,
            Self::NotRecorded => None,
            Self::CompressedRequest => None,
            Self::NoSuchMethod => None,
            Self::NotGrpc => None,
        }
    }
}

/// Why a gap is in a stream: `GapBegin.reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GapReason {
    /// The apiserver no longer had the events after the version.
    Expired,
    /// The apiserver no longer had the next page of a list.
    ContinueExpired,
    /// The apiserver did not serve the resource for a time.
    NotFound,
    /// The apiserver did not let kubefan read the resource for a time.
    Forbidden,
    /// An event was longer than the limit.
    LineTooLong,
    /// An object could not be parsed.
    BrokenObject,
    /// The events were not in order.
    OutOfOrder,
    /// The schema or the server's version has changed, so the same objects may have other bytes.
    SchemaChanged,
    /// A comparison with the apiserver found a difference.
    SelfCheck,
    /// The rest of what was being read is lost, and no version is known to continue from.
    Interrupted,
    /// The kubefan that is upstream sent a catch-up.
    CatchUp,
    /// A reason that this kubefan does not know. A newer one, upstream or a replica, has sent it.
    Other,
}

impl GapReason {
    /// Every reason.
    pub const ALL: &[Self] = &[
        Self::Expired,
        Self::ContinueExpired,
        Self::NotFound,
        Self::Forbidden,
        Self::LineTooLong,
        Self::BrokenObject,
        Self::OutOfOrder,
        Self::SchemaChanged,
        Self::SelfCheck,
        Self::Interrupted,
        Self::CatchUp,
        Self::Other,
    ];

    /// The text on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::ContinueExpired => "continue_expired",
            Self::NotFound => "not_found",
            Self::Forbidden => "forbidden",
            Self::LineTooLong => "line_too_long",
            Self::BrokenObject => "broken_object",
            Self::OutOfOrder => "out_of_order",
            Self::SchemaChanged => "schema_changed",
            Self::SelfCheck => "self_check",
            Self::Interrupted => "interrupted",
            Self::CatchUp => "catch_up",
            Self::Other => "other",
        }
    }
}

impl PartialEq<GapReason> for str {
    fn eq(&self, reason: &GapReason) -> bool {
        *self == *reason.as_str()
    }
}

impl PartialEq<GapReason> for &str {
    fn eq(&self, reason: &GapReason) -> bool {
        **self == *reason.as_str()
    }
}

impl PartialEq<GapReason> for String {
    fn eq(&self, reason: &GapReason) -> bool {
        *self == *reason.as_str()
    }
}

/// Keys of `google.rpc.ErrorInfo.metadata`.
pub mod error_metadata {
    /// The version that cannot be resumed from. With RESOURCE_VERSION_TOO_OLD.
    pub const REQUESTED_RESOURCE_VERSION: &str = "requested_resource_version";
    /// The oldest version that can be resumed from. With RESOURCE_VERSION_TOO_OLD.
    pub const OLDEST_RESOURCE_VERSION: &str = "oldest_resource_version";
    /// The version to resume from. Absent if the stream was inside a snapshot, a gap or a catch-up.
    /// With DRAINING, REBALANCED, CONNECTION_AGE.
    pub const RESUME_VERSION: &str = "resume_version";
    /// The apiserver's message while it cannot list the resource, because a conversion webhook is
    /// down for example. With NOT_SYNCED.
    pub const CAUSE: &str = "cause";
}
