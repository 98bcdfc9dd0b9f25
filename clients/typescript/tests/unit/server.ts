// A server that answers each call with a script, for cases that no real server produces on request.

import assert from "node:assert/strict";
import * as http2 from "node:http2";
import { BinaryWriter, WireType } from "@bufbuild/protobuf/wire";
import { Code, ConnectError, type HandlerContext } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import {
  ResourceState,
  WatchService,
  type ListRequest,
  type ListResponse,
  type WatchRequest,
  type WatchResponse,
} from "../../src/gen/kubefan/v1alpha1/watch_pb.js";

type Answer = AsyncIterable<WatchResponse> | Iterable<WatchResponse>;
/** The script of a watch's answer. */
export type Script = (request: WatchRequest, context: HandlerContext) => Answer;

/** Settings of a server. */
export interface ServerOptions {
  /** The Unix socket; a free port of loopback otherwise. */
  readonly path?: string;
  /** The certificate and its key. */
  readonly tls?: http2.SecureServerOptions;
  readonly list?: (request: ListRequest) => Iterable<ListResponse>;
}

/** A WatchService. Each watch gets the next script, and waits without one. */
export class Server {
  readonly requests: WatchRequest[] = [];
  /** The `authorization` of each call. */
  readonly tokens: string[] = [];
  readonly address: string;
  readonly #server: http2.Http2Server;
  readonly #sessions = new Set<http2.ServerHttp2Session>();

  private constructor(server: http2.Http2Server, address: string) {
    this.#server = server;
    this.address = address;
    server.on("session", (session) => {
      this.#sessions.add(session);
      session.on("close", () => this.#sessions.delete(session));
      session.on("error", () => undefined);
    });
  }

  /** Starts a server. */
  static async start(scripts: Script[] = [], options: ServerOptions = {}): Promise<Server> {
    const waiting = [...scripts];
    const made: { server?: Server } = {};
    const handler = connectNodeAdapter({
      acceptCompression: [],
      routes: (router) => {
        router.service(WatchService, {
          watch(request, context) {
            made.server?.requests.push(request);
            made.server?.tokens.push(context.requestHeader.get("authorization") ?? "");
            return iterate((waiting.shift() ?? idle)(request, context));
          },
          list: (request, context) => {
            made.server?.tokens.push(context.requestHeader.get("authorization") ?? "");
            return iterate((options.list ?? (() => []))(request));
          },
          listResources: (_, context) => {
            made.server?.tokens.push(context.requestHeader.get("authorization") ?? "");
            return { resources: [{ name: "pods", state: ResourceState.SYNCED, objectCount: 3n }] };
          },
        });
      },
    });
    const server =
      options.tls === undefined
        ? http2.createServer(handler)
        : http2.createSecureServer(options.tls, handler);
    await new Promise<void>((resolve) => {
      if (options.path === undefined) {
        server.listen(0, "127.0.0.1", resolve);
      } else {
        server.listen(options.path, resolve);
      }
    });
    const bound = server.address();
    const port = typeof bound === "object" && bound !== null ? bound.port : 0;
    const scheme = options.tls === undefined ? "" : "https://";
    const address =
      options.path === undefined ? `${scheme}127.0.0.1:${String(port)}` : `unix:${options.path}`;
    made.server = new Server(server, address);
    return made.server;
  }

  /** Takes another certificate for the connections to come. Only of a server with TLS. */
  renew(tls: http2.SecureServerOptions): void {
    assert("setSecureContext" in this.#server);
    (this.#server as http2.Http2SecureServer).setSecureContext(tls);
  }

  /** Ends all connections without a GOAWAY. */
  cut(): void {
    for (const session of this.#sessions) {
      session.destroy();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const closed = new Promise<void>((resolve) => {
      this.#server.close(() => {
        resolve();
      });
    });
    this.cut();
    await closed;
  }
}

async function* iterate<T>(answer: AsyncIterable<T> | Iterable<T>): AsyncGenerator<T> {
  yield* answer;
}

/** Stays silent until the client ends the call. */
export const idle: Script = async function* (_, context) {
  if (!context.signal.aborted) {
    await new Promise((resolve) => {
      context.signal.addEventListener("abort", resolve, { once: true });
    });
  }
  yield* [];
};

/** Sends messages, then does something else; by default it stays silent. */
export function sends(messages: WatchResponse[], then: Script = idle): Script {
  return async function* (request, context) {
    yield* messages;
    yield* then(request, context);
  };
}

/** Ends the call without an error. */
export const ends: Script = () => [];

/** Ends the call with one of kubefan's errors. */
export function fails(code: Code, reason = "", message = reason, delayMs?: number): Script {
  return async function* () {
    yield* [];
    await Promise.resolve();
    throw errorWith(code, reason, message, delayMs);
  };
}

const TEXT = WireType.LengthDelimited;
const NUMBER = WireType.Varint;

/** One of kubefan's errors, as the server makes it. */
export function errorWith(
  code: Code,
  reason: string,
  message: string,
  delayMs?: number,
  field = "",
): ConnectError {
  const error = new ConnectError(message, code);
  const add = (type: string, writer: BinaryWriter): void => {
    error.details.push({ type: `google.rpc.${type}`, value: writer.finish() });
  };
  if (reason !== "") {
    const entry = new BinaryWriter().tag(1, TEXT).string("resume_version");
    entry.tag(2, TEXT).string("7");
    add(
      "ErrorInfo",
      new BinaryWriter()
        .tag(1, TEXT)
        .string(reason)
        .tag(2, TEXT)
        .string("kubefan.dev")
        .tag(3, TEXT)
        .bytes(entry.finish()),
    );
  }
  if (delayMs !== undefined) {
    const duration = new BinaryWriter().tag(1, NUMBER).int64(Math.floor(delayMs / 1_000));
    duration.tag(2, NUMBER).int32(Math.round((delayMs % 1_000) * 1e6));
    add("RetryInfo", new BinaryWriter().tag(1, TEXT).bytes(duration.finish()));
  }
  if (field !== "") {
    const violation = new BinaryWriter().tag(2, TEXT).string("why").tag(1, TEXT).string(field);
    add("BadRequest", new BinaryWriter().tag(1, TEXT).bytes(violation.finish()));
  }
  return error;
}
