// Code generated from proto/kubefan/v1alpha1/reasons.yaml by kubefan-codegen. DO NOT EDIT.

package kubefan

// ErrorDomain is the google.rpc.ErrorInfo domain of kubefan's reasons.
const ErrorDomain = "kubefan.dev"

// Reasons of errors: Error.Reason. A newer kubefan may have others.
const (
	// ReasonTooOld: "too old resource version: N (M)": history cannot resume from N. M is the oldest
	// version to resume from. List again, or watch without a version.
	ReasonTooOld = "RESOURCE_VERSION_TOO_OLD"

	// ReasonHistoryRewritten: The version is of another history, as after a restore of etcd from a
	// backup. List again, or watch without a version. Do not compare the new versions with older ones.
	ReasonHistoryRewritten = "HISTORY_REWRITTEN"

	// ReasonInvalidArgument: A bad selector, version or target, or an encoding that the resource does
	// not have. Correct the field that the BadRequest names.
	ReasonInvalidArgument = "INVALID_ARGUMENT"

	// ReasonMalformedRequest: The request cannot be decoded. Encode it as watch.proto says.
	ReasonMalformedRequest = "MALFORMED_REQUEST"

	// ReasonResourceNotFound: The apiserver does not serve the resource, or no longer. Correct the
	// name, or ask again after the resource was installed.
	ReasonResourceNotFound = "RESOURCE_NOT_FOUND"

	// ReasonObjectNotFound: There is no such object. Take it as the answer.
	ReasonObjectNotFound = "OBJECT_NOT_FOUND"

	// ReasonNotCached: kubefan is not configured to cache the resource, or not as protobuf; or it
	// cannot be cached, because its versions do not compare. Read it from the apiserver.
	ReasonNotCached = "NOT_CACHED"

	// ReasonUpstreamForbidden: The apiserver denies kubefan the resource. Give kubefan the right to
	// read it.
	ReasonUpstreamForbidden = "UPSTREAM_FORBIDDEN"

	// ReasonUnauthenticated: kubefan does not know the caller: there is no token, or the apiserver
	// does not accept it, or the client certificate is not of a trusted CA (--access=authorized). Send
	// a valid token or client certificate.
	ReasonUnauthenticated = "UNAUTHENTICATED"

	// ReasonForbidden: The caller may not read this, or no longer; the message has the apiserver's
	// words. Also for requests with impersonate-* metadata. Name a namespace in the target, if the
	// caller may read single namespaces.
	ReasonForbidden = "FORBIDDEN"

	// ReasonReauthenticate: The token or client certificate of the stream has expired, an object that
	// the token is bound to was deleted, or the stream has reached limits.streamAgeMax. Resume with a
	// valid token. Nothing is lost.
	ReasonReauthenticate = "REAUTHENTICATE"

	// ReasonSwitched: The operator has changed who answers reads of the resource. Resume from the last
	// version. Nothing is lost.
	ReasonSwitched = "SWITCHED"

	// ReasonPassthrough: The operator lets the apiserver answer reads of the resource. Retry until
	// that ends, or read from the apiserver.
	ReasonPassthrough = "PASSTHROUGH"

	// ReasonDisconnected: An operator ended the stream with kubefan disconnect. Resume. Nothing is
	// lost.
	ReasonDisconnected = "DISCONNECTED"

	// ReasonNotSynced: The resource is not read completely yet. Retry.
	ReasonNotSynced = "NOT_SYNCED"

	// ReasonStale: The state is older than --max-staleness. Retry. Another replica may be fresher.
	ReasonStale = "STALE"

	// ReasonTooLarge: This replica has not reached the requested version. Retry. Another replica may
	// be ahead.
	ReasonTooLarge = "RESOURCE_VERSION_TOO_LARGE"

	// ReasonUpstreamUnavailable: The answer needs the apiserver, which cannot be reached. Retry.
	ReasonUpstreamUnavailable = "UPSTREAM_UNAVAILABLE"

	// ReasonStopped: The cache of the resource ended. Resume.
	ReasonStopped = "STOPPED"

	// ReasonDraining: kubefan is shutting down. Resume on a new connection.
	ReasonDraining = "DRAINING"

	// ReasonRebalanced: Nothing has failed. Other replicas have fewer streams. Resume at once, on a
	// new connection.
	ReasonRebalanced = "REBALANCED"

	// ReasonConnectionAge: Nothing has failed. The connection has reached limits.connectionAgeMax.
	// Resume at once, on a new connection.
	ReasonConnectionAge = "CONNECTION_AGE"

	// ReasonTLSRequired: The call came without TLS to a port that needs it. Use an https:// address.
	ReasonTLSRequired = "TLS_REQUIRED"

	// ReasonRequestTimeout: The request did not arrive within 10 s. Send the message of the request
	// with the call.
	ReasonRequestTimeout = "REQUEST_TIMEOUT"

	// ReasonDeadlineExceeded: The call's own deadline has passed. Allow more time, or end a watch by
	// timeout_seconds.
	ReasonDeadlineExceeded = "DEADLINE_EXCEEDED"

	// ReasonLimitReached: A limit is reached. The message names it. Retry after the delay, which may
	// be longer than usual.
	ReasonLimitReached = "LIMIT_REACHED"

	// ReasonSnapshotStalled: The subscriber took less than 16 KiB of a snapshot in
	// tuning.snapshotStallTimeout, or after two of them less than 1 MiB in each on average. Start
	// again, and read faster.
	ReasonSnapshotStalled = "SNAPSHOT_STALLED"

	// ReasonRequestTooLong: The request is longer than limits.maxMessageSize. Send a shorter selector
	// or projection.
	ReasonRequestTooLong = "REQUEST_TOO_LONG"

	// ReasonNotRecorded: The call cannot be recorded, and --audit-log-mode=blocking-strict demands it.
	// Retry later.
	ReasonNotRecorded = "NOT_RECORDED"

	// ReasonCompressedRequest: The request is compressed. Send requests uncompressed.
	ReasonCompressedRequest = "COMPRESSED_REQUEST"

	// ReasonNoSuchMethod: There is no such method. Call one of watch.proto.
	ReasonNoSuchMethod = "NO_SUCH_METHOD"

	// ReasonNotGRPC: The watch was not requested as plain gRPC. Call by POST over HTTP/2 with
	// content-type application/grpc.
	ReasonNotGRPC = "NOT_GRPC"
)

// Reasons of gaps: Item.Reason. A newer kubefan may have others.
const (
	// GapReasonExpired: The apiserver no longer had the events after the version.
	GapReasonExpired = "expired"

	// GapReasonContinueExpired: The apiserver no longer had the next page of a list.
	GapReasonContinueExpired = "continue_expired"

	// GapReasonNotFound: The apiserver did not serve the resource for a time.
	GapReasonNotFound = "not_found"

	// GapReasonForbidden: The apiserver did not let kubefan read the resource for a time.
	GapReasonForbidden = "forbidden"

	// GapReasonLineTooLong: An event was longer than the limit.
	GapReasonLineTooLong = "line_too_long"

	// GapReasonBrokenObject: An object could not be parsed.
	GapReasonBrokenObject = "broken_object"

	// GapReasonOutOfOrder: The events were not in order.
	GapReasonOutOfOrder = "out_of_order"

	// GapReasonSchemaChanged: The schema or the server's version has changed, so the same objects may
	// have other bytes.
	GapReasonSchemaChanged = "schema_changed"

	// GapReasonSelfCheck: A comparison with the apiserver found a difference.
	GapReasonSelfCheck = "self_check"

	// GapReasonInterrupted: The rest of what was being read is lost, and no version is known to
	// continue from.
	GapReasonInterrupted = "interrupted"

	// GapReasonCatchUp: The kubefan that is upstream sent a catch-up.
	GapReasonCatchUp = "catch_up"

	// GapReasonOther: A reason that this kubefan does not know. A newer one, upstream or a replica,
	// has sent it.
	GapReasonOther = "other"
)

// Keys of Error.Metadata.
const (
	// MetadataRequestedResourceVersion: The version that cannot be resumed from. With
	// RESOURCE_VERSION_TOO_OLD.
	MetadataRequestedResourceVersion = "requested_resource_version"

	// MetadataOldestResourceVersion: The oldest version that can be resumed from. With
	// RESOURCE_VERSION_TOO_OLD.
	MetadataOldestResourceVersion = "oldest_resource_version"

	// MetadataResumeVersion: The version to resume from. Absent if the stream was inside a snapshot, a
	// gap or a catch-up. With DRAINING, REBALANCED, CONNECTION_AGE.
	MetadataResumeVersion = "resume_version"

	// MetadataCause: The apiserver's message while it cannot list the resource, because a conversion
	// webhook is down for example. With NOT_SYNCED.
	MetadataCause = "cause"
)
