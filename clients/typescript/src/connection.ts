// A connection to kubefan: calls with their token, and their errors.

import { setMaxListeners } from "node:events";
import { setImmediate as nextTurn } from "node:timers/promises";
import { createClient, type CallOptions, type Client as Rpc } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { endpointOf, withTimes, type ClientOptions } from "./endpoint.js";
import { KubefanError, Unauthenticated, Unreachable, errorOf } from "./errors.js";
import { REAL_CLOCK } from "./fallback.js";
import { FallbackReads } from "./fallback-reads.js";
import { WatchService } from "./gen/kubefan/v1alpha1/watch_pb.js";
import { isServing } from "./health.js";
import { Sessions } from "./sessions.js";
import type { Token } from "./token.js";
import { VERSION } from "./version.js";

/** The version that the server sees. */
const USER_AGENT = `kubefan-typescript/${VERSION}`;
/** The limit of a call that lists or gets. */
const CALL_MS_MAX = 300_000;

/** kubefan may keep a call for this long without the headers of an answer. */
export const ANSWER_MS_MAX = 10_000;
/** The limit of a probe. */
const PROBE_MS_MAX = 3_000;

/** A list or a get, as it is made at kubefan and at the apiserver. */
export interface EitherRead<T> {
  /** Reads of one kind share what kubefan says about them. */
  readonly kind: string;
  readonly ask: (options: CallOptions) => Promise<T>;
  readonly direct: (reads: FallbackReads, signal: AbortSignal) => Promise<T>;
}

/** The error of a call without an answer. */
export function noAnswer(address: string): Unreachable {
  const problem = `no answer within ${String(ANSWER_MS_MAX / 1_000)} s`;
  return new Unreachable(`cannot reach kubefan at ${address}: ${problem}`, { code: "UNAVAILABLE" });
}

/** State that all calls of a client share. */
export class Connection {
  readonly address: string;
  readonly token: Token;
  readonly rpc: Rpc<typeof WatchService>;
  /** The reads that may go to the apiserver. Undefined without one. */
  readonly fallback: FallbackReads | undefined;
  readonly #sessions: Sessions;
  readonly #connectTimeoutMs: number;
  /** Aborted by `close`. */
  readonly #closed = new AbortController();

  constructor(address: string, given: ClientOptions) {
    const options = withTimes(given);
    const endpoint = endpointOf(address, options);
    // One listener for each watch, which removes it. Node warns above ten.
    setMaxListeners(0, this.#closed.signal);
    this.address = address;
    this.token = endpoint.token;
    this.#sessions = new Sessions(endpoint, options);
    this.#connectTimeoutMs = options.connectTimeoutMs ?? 10_000;
    const transport = createGrpcTransport({
      baseUrl: endpoint.origin,
      sessionManager: this.#sessions,
      readMaxBytes: options.messageBytesMax ?? 64 * 2 ** 20,
      // kubefan refuses compressed requests, and compresses its answers by `Encoding`.
      acceptCompression: [],
    });
    this.rpc = createClient(WatchService, transport);
    const { apiserver, budget = {}, onSide, onStart } = options;
    if (apiserver !== undefined) {
      const probe = (): Promise<boolean> =>
        isServing(transport, headersOf(undefined), PROBE_MS_MAX);
      this.fallback = new FallbackReads({
        address,
        apiserver,
        budget,
        clock: REAL_CLOCK,
        probe,
        onSide,
        onStart,
      });
    }
  }

  /** Aborted when the connection was closed. */
  get closed(): AbortSignal {
    return this.#closed.signal;
  }

  /** The `authorization` of the next call. Throws `Unreachable` if its file cannot be read. */
  authorization(): string | undefined {
    try {
      return this.token.header();
    } catch (error) {
      const problem = error instanceof Error ? error.message : String(error);
      throw new Unreachable(`cannot reach kubefan at ${this.address}: ${problem}`);
    }
  }

  /** Asks with the token; once more if kubefan refuses it and the file has another. */
  async call<T>(
    ask: (options: CallOptions) => Promise<T>,
    signal?: AbortSignal,
    isConnecting = false,
  ): Promise<T> {
    for (let attempt = 1; ; attempt++) {
      signal?.throwIfAborted();
      const sent = this.authorization();
      try {
        return await ask({
          headers: headersOf(sent),
          timeoutMs: isConnecting ? this.#connectTimeoutMs : CALL_MS_MAX,
          ...(signal === undefined ? {} : { signal }),
        });
      } catch (failure) {
        await outsideOfHttp2();
        signal?.throwIfAborted();
        const error = errorOf(failure, this.address);
        const isRefused = error instanceof Unauthenticated;
        if (!isRefused || attempt > 1 || !this.token.replacement(sent)) {
          throw error;
        }
      }
    }
  }

  /** Asks kubefan, and the apiserver while kubefan is away. */
  async either<T>(read: EitherRead<T>, signal?: AbortSignal): Promise<T> {
    const reads = this.fallback;
    if (reads === undefined) {
      return this.call(read.ask, signal);
    }
    const limit = AbortSignal.any([
      this.closed,
      AbortSignal.timeout(CALL_MS_MAX),
      ...(signal === undefined ? [] : [signal]),
    ]);
    for (;;) {
      signal?.throwIfAborted();
      const { isHealthy, epoch } = reads.monitor;
      if (isHealthy) {
        try {
          const found = await this.call((options) => this.#answered(read.ask, options), signal);
          reads.note(undefined, epoch, read.kind);
          return found;
        } catch (error) {
          if (limit.aborted || !(error instanceof KubefanError)) {
            throw error;
          }
          let verdict = reads.note(error, epoch, read.kind);
          if (verdict === "busyForLong") {
            verdict = await reads.judge(error, epoch);
          }
          if (verdict === "answered" || verdict === "busy") {
            throw error;
          }
          if (verdict === "away") {
            continue;
          }
        }
      }
      if (await reads.start({ hasState: false, isForKubefan: !isHealthy, signal: limit })) {
        return read.direct(reads, limit);
      }
      if (limit.aborted) {
        signal?.throwIfAborted();
        throw new Unreachable(`no answer from kubefan at ${this.address} or the apiserver`, {
          code: "DEADLINE_EXCEEDED",
        });
      }
    }
  }

  /** Asks, and ends the call if there is no answer in time. */
  async #answered<T>(
    ask: (options: CallOptions) => Promise<T>,
    options: CallOptions,
  ): Promise<T> {
    const late = new AbortController();
    const timer = setTimeout(() => {
      late.abort();
    }, ANSWER_MS_MAX);
    const { signal } = options;
    try {
      return await ask({
        ...options,
        signal: signal === undefined ? late.signal : AbortSignal.any([signal, late.signal]),
        onHeader: (headers) => {
          clearTimeout(timer);
          this.fallback?.learn(headers);
        },
      });
    } catch (error) {
      if (late.signal.aborted) {
        throw noAnswer(this.address);
      }
      throw error;
    } finally {
      clearTimeout(timer);
    }
  }

  /** Closes the connection, and ends all its calls. */
  close(): void {
    this.#closed.abort();
    this.fallback?.close();
    this.#sessions.close();
  }
}

/**
 * Waits before the failure of a call is handled. A GOAWAY fails calls from inside of Node's HTTP/2
 * code. A program that ended another call of the same connection there, such as by closing the
 * client, would loop in that code for ever (seen in Node 20).
 */
export async function outsideOfHttp2(): Promise<void> {
  await nextTurn();
}

/** The headers of a call with this token. */
export function headersOf(authorization: string | undefined): Record<string, string> {
  const agent = { "User-Agent": USER_AGENT };
  return authorization === undefined ? agent : { ...agent, Authorization: authorization };
}
