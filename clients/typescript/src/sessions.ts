// The HTTP/2 connections of a client: one to each address of the name.
//
// A name may have the address of each replica. A call goes to the next address that is there, so a
// watch that resumes leaves a replica that lags.

import { lookup } from "node:dns/promises";
import type {
  ClientHttp2Session,
  ClientHttp2Stream,
  ClientSessionRequestOptions,
  OutgoingHttpHeaders,
} from "node:http2";
import * as net from "node:net";
import * as tls from "node:tls";
import { Code, ConnectError } from "@connectrpc/connect";
import { Http2SessionManager } from "@connectrpc/connect-node";
import type { ClientOptions, Endpoint } from "./endpoint.js";

/** With HTTP/2's default of 64 KiB a snapshot arrives at a quarter of the speed. */
const WINDOW_BYTES = 4 * 2 ** 20;
const FRAME_BYTES_MAX = 2 ** 20;
/** The addresses of a name are looked up again after this time, or if none of them answers. */
const LOOKUP_MS = 5_000;
/** An address that did not answer is tried last for this time: a dead one costs the whole limit. */
const RETRY_MS = 30_000;
/** The memory of a session in MB. Node's default refuses new streams beside a large snapshot. */
const SESSION_MEMORY_MB = 1_024;

/** Hands the calls to the connections. */
export class Sessions {
  readonly authority: string;
  readonly #endpoint: Endpoint;
  readonly #options: ClientOptions;
  readonly #managers = new Map<string, Http2SessionManager>();
  readonly #prepared = new WeakSet<ClientHttp2Session>();
  readonly #owners = new WeakMap<ClientHttp2Stream, Http2SessionManager>();
  /** Time of the last failed attempt, by address. */
  readonly #failedAt = new Map<string, number>();
  #addresses: string[] = [];
  #lookedUpAt = -Infinity;
  #next = 0;
  #isClosed = false;

  constructor(endpoint: Endpoint, options: ClientOptions) {
    this.#endpoint = endpoint;
    this.#options = options;
    this.authority = endpoint.origin;
  }

  /** Issues a request on the next connection. */
  async request(
    method: string,
    path: string,
    headers: OutgoingHttpHeaders,
    options: Omit<ClientSessionRequestOptions, "signal">,
  ): Promise<ClientHttp2Stream> {
    const addresses = await this.#resolve();
    let failure: unknown = new ConnectError("the name has no address", Code.Unavailable);
    for (const address of this.#inTurn(addresses)) {
      if (this.#isClosed) {
        throw new ConnectError("the client is closed", Code.Canceled);
      }
      const manager = this.#manager(address);
      try {
        const stream = await manager.request(method, path, headers, options);
        this.#owners.set(stream, manager);
        this.#prepare(stream);
        this.#failedAt.delete(address);
        return stream;
      } catch (error) {
        failure = error;
        this.#failedAt.set(address, performance.now());
      }
    }
    this.#lookedUpAt = -Infinity;
    throw failure;
  }

  /** Something was received, so the connection needs no PING now. */
  notifyResponseByteRead(stream: ClientHttp2Stream): void {
    this.#owners.get(stream)?.notifyResponseByteRead(stream);
  }

  /** Closes all connections, and ends their calls. */
  close(): void {
    this.#isClosed = true;
    for (const manager of this.#managers.values()) {
      manager.abort();
    }
    this.#managers.clear();
  }

  /** The addresses, from the next one on. Those that did not answer just now come last. */
  #inTurn(addresses: string[]): string[] {
    const at = this.#next++ % Math.max(1, addresses.length);
    const turned = [...addresses.slice(at), ...addresses.slice(0, at)];
    const since = performance.now() - RETRY_MS;
    const isDead = (address: string): boolean => (this.#failedAt.get(address) ?? -Infinity) > since;
    return [
      ...turned.filter((address) => !isDead(address)),
      ...turned.filter((address) => isDead(address)),
    ];
  }

  async #resolve(): Promise<string[]> {
    const place = this.#endpoint.place;
    if ("path" in place) {
      return [place.path];
    }
    const now = performance.now();
    if (now - this.#lookedUpAt < LOOKUP_MS) {
      return this.#addresses;
    }
    const found = await lookup(place.host, { all: true }).catch((error: unknown) => {
      throw new ConnectError(messageOf(error), Code.Unavailable, undefined, undefined, error);
    });
    this.#addresses = [...new Set(found.map((one) => one.address))];
    this.#lookedUpAt = now;
    for (const [address, manager] of this.#managers) {
      // A replica that is gone. Its connection stays as long as it has calls.
      if (!this.#addresses.includes(address) && manager.state() !== "open") {
        manager.abort();
        this.#managers.delete(address);
        this.#failedAt.delete(address);
      }
    }
    return this.#addresses;
  }

  #manager(address: string): Http2SessionManager {
    let manager = this.#managers.get(address);
    if (manager === undefined) {
      manager = new Http2SessionManager(
        this.#endpoint.origin,
        {
          pingIntervalMs: this.#options.keepaliveIntervalMs ?? 30_000,
          pingTimeoutMs: this.#options.keepaliveTimeoutMs ?? 15_000,
        },
        {
          createConnection: () => this.#connect(address),
          settings: {
            enablePush: false,
            initialWindowSize: WINDOW_BYTES,
            maxFrameSize: FRAME_BYTES_MAX,
          },
          maxSessionMemory: SESSION_MEMORY_MB,
        },
      );
      this.#managers.set(address, manager);
    }
    return manager;
  }

  #connect(address: string): net.Socket {
    const { place, tls: secure } = this.#endpoint;
    const limitMs = this.#options.connectTimeoutMs ?? 10_000;
    if ("path" in place) {
      return net.connect({ path: place.path });
    }
    if (secure === undefined) {
      return limited(net.connect({ host: address, port: place.port, noDelay: true }), limitMs);
    }
    const { context, serverName } = secure;
    const name = net.isIP(serverName) === 0 ? { servername: serverName } : {};
    const socket = tls.connect({
      host: address,
      port: place.port,
      ...name,
      secureContext: context(),
      ALPNProtocols: ["h2"],
      // With an address in place of a name, Node would compare the certificate with `host`, which
      // is the same only without `serverName`.
      checkServerIdentity: (_, certificate) => tls.checkServerIdentity(serverName, certificate),
    });
    socket.setNoDelay(true);
    return limited(socket, limitMs);
  }

  #prepare(stream: ClientHttp2Stream): void {
    const session = stream.session as ClientHttp2Session | undefined;
    if (session === undefined || this.#prepared.has(session)) {
      return;
    }
    this.#prepared.add(session);
    session.setLocalWindowSize(2 * WINDOW_BYTES);
  }
}

/**
 * Ends a socket that does not connect in time, or whose server says nothing: a process that hangs
 * still has its connections accepted, but does not send the settings that begin HTTP/2.
 */
function limited(socket: net.Socket, limitMs: number): net.Socket {
  const timer = setTimeout(() => {
    if (socket.bytesRead > 0) {
      return;
    }
    socket.destroy(
      Object.assign(new Error(`no connection in ${String(limitMs / 1_000)} s`), {
        code: "ETIMEDOUT",
      }),
    );
  }, limitMs);
  socket.once("close", () => {
    clearTimeout(timer);
  });
  return socket;
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
