// Errors of the apiserver: those that kubefan would have.

import {
  Expired,
  Forbidden,
  InvalidArgument,
  LimitReached,
  NotFound,
  Unauthenticated,
  Unavailable,
  type KubefanError,
} from "./errors.js";
import { ErrorReason } from "./reasons.js";

/** An error that a retry may fix. */
export function failureAt(server: string, problem: string): KubefanError {
  return new Unavailable(`the apiserver at ${server}: ${problem}`, {
    code: "UNAVAILABLE",
    reason: ErrorReason.UPSTREAM_UNAVAILABLE,
  });
}

/** The error of a request that would send credentials where others can read them. */
export function plainTextAt(server: string): KubefanError {
  return new InvalidArgument(
    `the apiserver at ${server} has no TLS, so it gets no credentials: use https://`,
    { code: "INVALID_ARGUMENT", reason: ErrorReason.INVALID_ARGUMENT },
  );
}

/** The longest delay before a retry that the apiserver may ask for. */
const RETRY_MS_MAX = 60_000;

/** The error of an answer. A 404 has the reason `notFound`. */
export function refusalAt(
  server: string,
  status: number,
  body: string,
  notFound: string,
  retryAfter = "",
): KubefanError {
  const { message, seconds } = detailsOf(body);
  const delay = /^[0-9]+$/.test(retryAfter) ? Number(retryAfter) : seconds;
  const text = `the apiserver at ${server} answers ${String(status)}: ${message}`;
  const retryAfterMs = delay === undefined ? undefined : Math.min(delay * 1_000, RETRY_MS_MAX);
  switch (status) {
    case 401:
      return new Unauthenticated(text, {
        code: "UNAUTHENTICATED",
        reason: ErrorReason.UNAUTHENTICATED,
      });
    case 403:
      return new Forbidden(text, { code: "PERMISSION_DENIED", reason: ErrorReason.FORBIDDEN });
    case 404:
      return new NotFound(text, { code: "NOT_FOUND", reason: notFound });
    case 410:
      return new Expired(text, { code: "OUT_OF_RANGE", reason: ErrorReason.TOO_OLD });
    case 429:
      return new LimitReached(text, {
        code: "RESOURCE_EXHAUSTED",
        reason: ErrorReason.LIMIT_REACHED,
        retryAfterMs: Math.max(retryAfterMs ?? 0, 1_000),
      });
    default:
      break;
  }
  if (status < 500) {
    const details = { code: "INVALID_ARGUMENT", reason: ErrorReason.INVALID_ARGUMENT } as const;
    return new InvalidArgument(text, { ...details, retryAfterMs });
  }
  const reason = ErrorReason.UPSTREAM_UNAVAILABLE;
  return new Unavailable(text, { code: "UNAVAILABLE", reason, retryAfterMs });
}

interface Status {
  readonly message?: string;
  readonly details?: { readonly retryAfterSeconds?: number };
}

function detailsOf(body: string): { message: string; seconds: number | undefined } {
  try {
    const found = JSON.parse(body) as Status;
    const seconds = found.details?.retryAfterSeconds;
    return { message: found.message ?? "no message", seconds };
  } catch {
    return { message: body.slice(0, 200).trim(), seconds: undefined };
  }
}
