// A connection to kubefan: calls with their token, and their errors.

import { setMaxListeners } from "node:events";
import { setImmediate as nextTurn } from "node:timers/promises";
import { createClient, type CallOptions, type Client as Rpc } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { endpointOf, type ClientOptions } from "./endpoint.js";
import { Unauthenticated, Unreachable, errorOf } from "./errors.js";
import { WatchService } from "./gen/kubefan/v1alpha1/watch_pb.js";
import { Sessions } from "./sessions.js";
import type { Token } from "./token.js";
import { VERSION } from "./version.js";

/** The version that the server sees. */
const USER_AGENT = `kubefan-typescript/${VERSION}`;
/** The limit of a call that lists or gets. */
const CALL_MS_MAX = 300_000;

/** State that all calls of a client share. */
export class Connection {
  readonly address: string;
  readonly token: Token;
  readonly rpc: Rpc<typeof WatchService>;
  readonly #sessions: Sessions;
  readonly #connectTimeoutMs: number;
  /** Aborted by `close`. */
  readonly #closed = new AbortController();

  constructor(address: string, options: ClientOptions) {
    const endpoint = endpointOf(address, options);
    // One listener for each watch, which removes it. Node warns above ten.
    setMaxListeners(0, this.#closed.signal);
    this.address = address;
    this.token = endpoint.token;
    this.#sessions = new Sessions(endpoint, options);
    this.#connectTimeoutMs = options.connectTimeoutMs ?? 10_000;
    this.rpc = createClient(
      WatchService,
      createGrpcTransport({
        baseUrl: endpoint.origin,
        sessionManager: this.#sessions,
        readMaxBytes: options.messageBytesMax ?? 64 * 2 ** 20,
        // kubefan refuses compressed requests, and compresses its answers by `Encoding`.
        acceptCompression: [],
      }),
    );
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

  /** Closes the connection, and ends all its calls. */
  close(): void {
    this.#closed.abort();
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
