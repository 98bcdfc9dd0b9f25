// Errors. Each names the problem and the remedy.

import { BinaryReader, WireType } from "@bufbuild/protobuf/wire";
import { Code, ConnectError } from "@connectrpc/connect";
import { ERROR_DOMAIN, ErrorReason } from "./reasons.js";

/** gRPC status codes. */
export type StatusCode =
  | "CANCELLED"
  | "UNKNOWN"
  | "INVALID_ARGUMENT"
  | "DEADLINE_EXCEEDED"
  | "NOT_FOUND"
  | "ALREADY_EXISTS"
  | "PERMISSION_DENIED"
  | "RESOURCE_EXHAUSTED"
  | "FAILED_PRECONDITION"
  | "ABORTED"
  | "OUT_OF_RANGE"
  | "UNIMPLEMENTED"
  | "INTERNAL"
  | "UNAVAILABLE"
  | "DATA_LOSS"
  | "UNAUTHENTICATED";

const CODES: Record<Code, StatusCode> = {
  [Code.Canceled]: "CANCELLED",
  [Code.Unknown]: "UNKNOWN",
  [Code.InvalidArgument]: "INVALID_ARGUMENT",
  [Code.DeadlineExceeded]: "DEADLINE_EXCEEDED",
  [Code.NotFound]: "NOT_FOUND",
  [Code.AlreadyExists]: "ALREADY_EXISTS",
  [Code.PermissionDenied]: "PERMISSION_DENIED",
  [Code.ResourceExhausted]: "RESOURCE_EXHAUSTED",
  [Code.FailedPrecondition]: "FAILED_PRECONDITION",
  [Code.Aborted]: "ABORTED",
  [Code.OutOfRange]: "OUT_OF_RANGE",
  [Code.Unimplemented]: "UNIMPLEMENTED",
  [Code.Internal]: "INTERNAL",
  [Code.Unavailable]: "UNAVAILABLE",
  [Code.DataLoss]: "DATA_LOSS",
  [Code.Unauthenticated]: "UNAUTHENTICATED",
};

const RETRYABLE: ReadonlySet<StatusCode> = new Set<StatusCode>([
  "UNAVAILABLE",
  // Broken streams and proxies in between surface as these.
  "UNKNOWN",
  "INTERNAL",
  "CANCELLED",
  "ABORTED",
  "DEADLINE_EXCEEDED",
]);

/** The details of an error besides its message. */
export interface ErrorDetails {
  readonly code?: StatusCode;
  readonly reason?: string;
  readonly field?: string;
  readonly metadata?: Readonly<Record<string, string>>;
  readonly retryAfterMs?: number | undefined;
  readonly remedy?: string;
  readonly cause?: unknown;
}

/** A call failed. */
export class KubefanError extends Error {
  /** Advice for an error of this class, if nothing more exact is known. */
  protected static readonly remedy: string | undefined = undefined;

  /** The gRPC status code. */
  readonly code: StatusCode;
  /**
   * kubefan's stable reason, such as `RESOURCE_VERSION_TOO_LARGE`. Empty if another server or the
   * gRPC library made the error.
   */
  readonly reason: string;
  /** The invalid field of the request, such as `target.namespace`; empty if there is none. */
  readonly field: string;
  /** More about the reason. */
  readonly metadata: Readonly<Record<string, string>>;
  /** The delay that the server asks for before a retry. */
  readonly retryAfterMs: number | undefined;

  constructor(message: string, details: ErrorDetails = {}) {
    const remedy = details.remedy ?? new.target.remedy;
    super(
      remedy === undefined ? message : `${message}; ${remedy}`,
      details.cause === undefined ? undefined : { cause: details.cause },
    );
    this.name = new.target.name;
    this.code = details.code ?? "UNKNOWN";
    this.reason = details.reason ?? "";
    this.field = details.field ?? "";
    this.metadata = details.metadata ?? {};
    this.retryAfterMs = details.retryAfterMs;
  }

  /** Whether a retry of the same call may succeed. */
  get isRetryable(): boolean {
    return this.retryAfterMs !== undefined || RETRYABLE.has(this.code);
  }
}

/** The address, the CA file, the certificate or the token is invalid. */
export class InvalidAddress extends KubefanError {
  override get isRetryable(): boolean {
    return false;
  }
}

/** There is no connection, or it broke. */
export class Unreachable extends KubefanError {
  override get isRetryable(): boolean {
    return true;
  }
}

/** History cannot resume from the version: it is too old, or of another history. */
export class Expired extends KubefanError {
  protected static override readonly remedy = "list again, or watch without a resourceVersion";
}

/** There is no such object, or the apiserver does not serve the resource. */
export class NotFound extends KubefanError {}

/** kubefan is not configured to cache the resource. */
export class NotCached extends KubefanError {
  protected static override readonly remedy =
    "add it to kubefan serve --resource, or read it from the apiserver";
}

/** A selector, version or target is invalid: `field` names it. */
export class InvalidArgument extends KubefanError {}

/** kubefan does not know the caller. */
export class Unauthenticated extends KubefanError {
  protected static override readonly remedy = "give a valid token, tokenFile or client certificate";
}

/** The caller may not read this, or the apiserver denies it to kubefan. */
export class Forbidden extends KubefanError {}

/** kubefan cannot answer now: it is not synced, lags, or drains. A retry may succeed. */
export class Unavailable extends KubefanError {}

/** A limit of the server is reached, or the request is too long. */
export class LimitReached extends KubefanError {}

/** A message was damaged, or does not fit the client's state. A watch asks for it again. */
export class Undecodable extends KubefanError {
  override get isRetryable(): boolean {
    return true;
  }
}

/** The server does not speak kubefan's protocol. */
export class ProtocolError extends KubefanError {
  override get isRetryable(): boolean {
    return false;
  }
}

/** The informer has been stopped, which is final. */
export class Stopped extends KubefanError {
  override get isRetryable(): boolean {
    return false;
  }
}

type ErrorClass = new (message: string, details: ErrorDetails) => KubefanError;

const BY_CODE: Partial<Record<StatusCode, ErrorClass>> = {
  NOT_FOUND: NotFound,
  FAILED_PRECONDITION: NotCached,
  INVALID_ARGUMENT: InvalidArgument,
  UNAUTHENTICATED: Unauthenticated,
  PERMISSION_DENIED: Forbidden,
  UNAVAILABLE: Unavailable,
  RESOURCE_EXHAUSTED: LimitReached,
};

/** The error of a failed call. */
export function errorOf(failure: unknown, address: string): KubefanError {
  if (failure instanceof KubefanError) {
    return failure;
  }
  const error = ConnectError.from(failure);
  const code = CODES[error.code];
  const message = error.rawMessage === "" ? code : error.rawMessage;
  const { info, retryAfterMs, field } = detailsOf(error);
  if (info?.reason === ErrorReason.TLS_REQUIRED) {
    const needsTls = "the server needs TLS on this port; use an https:// address";
    return new Unreachable(`cannot reach kubefan at ${address}: ${needsTls}`, { code });
  }
  if (info === undefined) {
    const broken = systemCause(error);
    if (broken !== undefined || (code === "UNAVAILABLE" && retryAfterMs === undefined)) {
      const text = `cannot reach kubefan at ${address}: ${broken ?? message}`;
      return new Unreachable(text, { code, cause: error });
    }
    if (code === "CANCELLED") {
      // The caller's own end of a call was handled before. This is the library's word for a
      // connection that was closed.
      const text = `cannot reach kubefan at ${address}: the connection was closed (${message})`;
      return new Unreachable(text, { code: "UNAVAILABLE", cause: error });
    }
    if (code === "UNIMPLEMENTED" && message.includes("404")) {
      const port = "that port does not serve gRPC (HTTP status 404); is it kubefan's admin port?";
      const text = `${address} does not speak kubefan's protocol: ${port}`;
      return new ProtocolError(text, { code: "INTERNAL" });
    }
  }
  const reason = info?.reason ?? "";
  // The gRPC library may use the same code, but without a reason.
  const kind =
    code === "OUT_OF_RANGE" && reason !== "" ? Expired : (BY_CODE[code] ?? KubefanError);
  return new kind(message, {
    code,
    reason,
    field,
    metadata: info?.metadata ?? {},
    retryAfterMs,
    cause: error,
  });
}

/** The meaning of the codes of Node's errors. Other errors show their own message. */
const CAUSES: Readonly<Record<string, string>> = {
  UNABLE_TO_VERIFY_LEAF_SIGNATURE: "TRUST",
  UNABLE_TO_GET_ISSUER_CERT_LOCALLY: "TRUST",
  SELF_SIGNED_CERT_IN_CHAIN: "TRUST",
  DEPTH_ZERO_SELF_SIGNED_CERT: "TRUST",
  CERT_SIGNATURE_FAILURE: "TRUST",
  ERR_SSL_WRONG_VERSION_NUMBER: "the server does not speak TLS; use an address without https://",
  ERR_SSL_PACKET_LENGTH_TOO_LONG: "the server does not speak TLS; use an address without https://",
};
const TRUST =
  "no trusted CA has signed the server's certificate; caFile must contain the CA that has";

/** The system's reason for a broken connection, in plain words. */
function systemCause(error: ConnectError): string | undefined {
  let cause: unknown = error.cause;
  for (let depth = 0; depth < 4 && cause instanceof Error; depth++) {
    const code = "code" in cause && typeof cause.code === "string" ? cause.code : "";
    const known = CAUSES[code];
    if (known !== undefined) {
      return known === "TRUST" ? TRUST : known;
    }
    if (/^(E[A-Z]+|ERR_(SSL|TLS|HTTP2)_.*)$/.test(code)) {
      return cause.message === "" ? code : cause.message;
    }
    cause = cause.cause;
  }
  return undefined;
}

interface ErrorInfo {
  reason: string;
  domain: string;
  metadata: Record<string, string>;
}

// The details are three small messages of google.rpc. Reading their fields here spares a package
// with generated code for all of google.rpc.
function detailsOf(error: ConnectError): {
  info: ErrorInfo | undefined;
  retryAfterMs: number | undefined;
  field: string;
} {
  let info: ErrorInfo | undefined;
  let retryAfterMs: number | undefined;
  let field = "";
  for (const detail of error.details) {
    if (!("type" in detail)) {
      continue;
    }
    try {
      if (detail.type === "google.rpc.ErrorInfo") {
        const found = readErrorInfo(detail.value);
        info = found.domain === ERROR_DOMAIN ? found : info;
      } else if (detail.type === "google.rpc.RetryInfo") {
        retryAfterMs = readRetryInfo(detail.value);
      } else if (detail.type === "google.rpc.BadRequest") {
        field = readBadRequest(detail.value);
      }
    } catch {
      // A detail that cannot be read says nothing. The code and the message still do.
    }
  }
  return { info, retryAfterMs, field };
}

/** Passes on each field that is a text, bytes or an integer. Other fields are skipped. */
function readFields(
  bytes: Uint8Array,
  take: (field: number, reader: BinaryReader) => boolean,
): void {
  const reader = new BinaryReader(bytes);
  while (reader.pos < reader.len) {
    const [field, type] = reader.tag();
    const isKnown = type === WireType.LengthDelimited || type === WireType.Varint;
    if (!isKnown || !take(field, reader)) {
      reader.skip(type);
    }
  }
}

function readErrorInfo(bytes: Uint8Array): ErrorInfo {
  const info: ErrorInfo = { reason: "", domain: "", metadata: {} };
  readFields(bytes, (field, reader) => {
    if (field === 1) {
      info.reason = reader.string();
    } else if (field === 2) {
      info.domain = reader.string();
    } else if (field === 3) {
      const entry = ["", "", ""];
      readFields(reader.bytes(), (part, inner) => {
        entry[part] = inner.string();
        return true;
      });
      info.metadata[entry[1] ?? ""] = entry[2] ?? "";
    } else {
      return false;
    }
    return true;
  });
  return info;
}

function readRetryInfo(bytes: Uint8Array): number {
  let milliseconds = 0;
  readFields(bytes, (field, reader) => {
    if (field !== 1) {
      return false;
    }
    readFields(reader.bytes(), (part, inner) => {
      const value = Number(inner.int64());
      milliseconds += part === 1 ? value * 1_000 : part === 2 ? value / 1e6 : 0;
      return true;
    });
    return true;
  });
  return Math.max(0, milliseconds);
}

function readBadRequest(bytes: Uint8Array): string {
  let found = "";
  readFields(bytes, (field, reader) => {
    if (field !== 1) {
      return false;
    }
    readFields(reader.bytes(), (part, inner) => {
      if (part !== 1) {
        return false;
      }
      const name = inner.string();
      found = found === "" ? name : found;
      return true;
    });
    return true;
  });
  return found;
}
