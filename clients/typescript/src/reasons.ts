// Generated from proto/kubefan/v1alpha1/reasons.yaml by kubefan-codegen.

/** The domain of kubefan's reasons in `google.rpc.ErrorInfo`. */
export const ERROR_DOMAIN = "kubefan.dev";

/** Reasons of errors: `KubefanError.reason`. A newer kubefan may have others. */
export const ErrorReason = {
  /**
   * "too old resource version: N (M)": history cannot resume from N. M is the oldest version to
   * resume from. List again, or watch without a version.
   */
  TOO_OLD: "RESOURCE_VERSION_TOO_OLD",
  /**
   * The version is of another history, as after a restore of etcd from a backup. List again, or
   * watch without a version. Do not compare the new versions with older ones.
   */
  HISTORY_REWRITTEN: "HISTORY_REWRITTEN",
  /**
   * A bad selector, version or target, or an encoding that the resource does not have. Correct the
   * field that the BadRequest names.
   */
  INVALID_ARGUMENT: "INVALID_ARGUMENT",
  /**
   * The request cannot be decoded. Encode it as watch.proto says.
   */
  MALFORMED_REQUEST: "MALFORMED_REQUEST",
  /**
   * The apiserver does not serve the resource, or no longer. Correct the name, or ask again after
   * the resource was installed.
   */
  RESOURCE_NOT_FOUND: "RESOURCE_NOT_FOUND",
  /**
   * There is no such object. Take it as the answer.
   */
  OBJECT_NOT_FOUND: "OBJECT_NOT_FOUND",
  /**
   * kubefan is not configured to cache the resource, or not as protobuf; or it cannot be cached,
   * because its versions do not compare. Read it from the apiserver.
   */
  NOT_CACHED: "NOT_CACHED",
  /**
   * The apiserver denies kubefan the resource. Give kubefan the right to read it.
   */
  UPSTREAM_FORBIDDEN: "UPSTREAM_FORBIDDEN",
  /**
   * kubefan does not know the caller: there is no token, or the apiserver does not accept it, or
   * the client certificate is not of a trusted CA (`--access=authorized`). Send a valid token or
   * client certificate.
   */
  UNAUTHENTICATED: "UNAUTHENTICATED",
  /**
   * The caller may not read this, or no longer; the message has the apiserver's words. Also for
   * requests with `impersonate-*` metadata. Name a namespace in the target, if the caller may read
   * single namespaces.
   */
  FORBIDDEN: "FORBIDDEN",
  /**
   * The token or client certificate of the stream has expired, an object that the token is bound to
   * was deleted, or the stream has reached `limits.streamAgeMax`. Resume with a valid token.
   * Nothing is lost.
   */
  REAUTHENTICATE: "REAUTHENTICATE",
  /**
   * The operator has changed who answers reads of the resource. Resume from the last version.
   * Nothing is lost.
   */
  SWITCHED: "SWITCHED",
  /**
   * The operator lets the apiserver answer reads of the resource. Retry until that ends, or read
   * from the apiserver.
   */
  PASSTHROUGH: "PASSTHROUGH",
  /**
   * An operator ended the stream with `kubefan disconnect`. Resume. Nothing is lost.
   */
  DISCONNECTED: "DISCONNECTED",
  /**
   * The resource is not read completely yet. Retry.
   */
  NOT_SYNCED: "NOT_SYNCED",
  /**
   * The state is older than `--max-staleness`. Retry. Another replica may be fresher.
   */
  STALE: "STALE",
  /**
   * This replica has not reached the requested version. Retry. Another replica may be ahead.
   */
  TOO_LARGE: "RESOURCE_VERSION_TOO_LARGE",
  /**
   * The answer needs the apiserver, which cannot be reached. Retry.
   */
  UPSTREAM_UNAVAILABLE: "UPSTREAM_UNAVAILABLE",
  /**
   * The cache of the resource ended. Resume.
   */
  STOPPED: "STOPPED",
  /**
   * kubefan is shutting down. Resume on a new connection.
   */
  DRAINING: "DRAINING",
  /**
   * Nothing has failed. Other replicas have fewer streams. Resume at once, on a new connection.
   */
  REBALANCED: "REBALANCED",
  /**
   * Nothing has failed. The connection has reached `limits.connectionAgeMax`. Resume at once, on a
   * new connection.
   */
  CONNECTION_AGE: "CONNECTION_AGE",
  /**
   * The call came without TLS to a port that needs it. Use an `https://` address.
   */
  TLS_REQUIRED: "TLS_REQUIRED",
  /**
   * The request did not arrive within 10 s. Send the message of the request with the call.
   */
  REQUEST_TIMEOUT: "REQUEST_TIMEOUT",
  /**
   * The call's own deadline has passed. Allow more time, or end a watch by `timeout_seconds`.
   */
  DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
  /**
   * A limit is reached. The message names it. Retry after the delay, which may be longer than
   * usual.
   */
  LIMIT_REACHED: "LIMIT_REACHED",
  /**
   * The subscriber took less than 16 KiB of a snapshot in `tuning.snapshotStallTimeout`, or after
   * two of them less than 1 MiB in each on average. Start again, and read faster.
   */
  SNAPSHOT_STALLED: "SNAPSHOT_STALLED",
  /**
   * The request is longer than `limits.maxMessageSize`. Send a shorter selector or projection.
   */
  REQUEST_TOO_LONG: "REQUEST_TOO_LONG",
  /**
   * The call cannot be recorded, and `--audit-log-mode=blocking-strict` demands it. Retry later.
   */
  NOT_RECORDED: "NOT_RECORDED",
  /**
   * The request is compressed. Send requests uncompressed.
   */
  COMPRESSED_REQUEST: "COMPRESSED_REQUEST",
  /**
   * There is no such method. Call one of watch.proto.
   */
  NO_SUCH_METHOD: "NO_SUCH_METHOD",
  /**
   * The watch was not requested as plain gRPC. Call by POST over HTTP/2 with content-type
   * `application/grpc`.
   */
  NOT_GRPC: "NOT_GRPC",
} as const;

/** Reasons of gaps: `GapBegin.reason`. A newer kubefan may have others. */
export const GapReason = {
  /**
   * The apiserver no longer had the events after the version.
   */
  EXPIRED: "expired",
  /**
   * The apiserver no longer had the next page of a list.
   */
  CONTINUE_EXPIRED: "continue_expired",
  /**
   * The apiserver did not serve the resource for a time.
   */
  NOT_FOUND: "not_found",
  /**
   * The apiserver did not let kubefan read the resource for a time.
   */
  FORBIDDEN: "forbidden",
  /**
   * An event was longer than the limit.
   */
  LINE_TOO_LONG: "line_too_long",
  /**
   * An object could not be parsed.
   */
  BROKEN_OBJECT: "broken_object",
  /**
   * The events were not in order.
   */
  OUT_OF_ORDER: "out_of_order",
  /**
   * The schema or the server's version has changed, so the same objects may have other bytes.
   */
  SCHEMA_CHANGED: "schema_changed",
  /**
   * A comparison with the apiserver found a difference.
   */
  SELF_CHECK: "self_check",
  /**
   * The rest of what was being read is lost, and no version is known to continue from.
   */
  INTERRUPTED: "interrupted",
  /**
   * The kubefan that is upstream sent a catch-up.
   */
  CATCH_UP: "catch_up",
  /**
   * A reason that this kubefan does not know. A newer one, upstream or a replica, has sent it.
   */
  OTHER: "other",
} as const;

/** Keys of `KubefanError.metadata`. */
export const ErrorMetadata = {
  /**
   * The version that cannot be resumed from. With RESOURCE_VERSION_TOO_OLD.
   */
  REQUESTED_RESOURCE_VERSION: "requested_resource_version",
  /**
   * The oldest version that can be resumed from. With RESOURCE_VERSION_TOO_OLD.
   */
  OLDEST_RESOURCE_VERSION: "oldest_resource_version",
  /**
   * The version to resume from. Absent if the stream was inside a snapshot, a gap or a catch-up.
   * With DRAINING, REBALANCED, CONNECTION_AGE.
   */
  RESUME_VERSION: "resume_version",
  /**
   * The apiserver's message while it cannot list the resource, because a conversion webhook is down
   * for example. With NOT_SYNCED.
   */
  CAUSE: "cause",
} as const;
