// The client: calls that return promises, watches for `for await`, and informers.

import { inspect } from "node:util";
import type { CallOptions as RpcOptions } from "@connectrpc/connect";
import { Connection } from "./connection.js";
import type { ClientOptions } from "./endpoint.js";
import { ProtocolError, Unreachable } from "./errors.js";
import { kindOf, type FallbackReads } from "./fallback-reads.js";
import { IN_CLUSTER_ADDRESS, inClusterOptions } from "./in-cluster.js";
import { Informer } from "./informer.js";
import {
  ListReader,
  getRequest,
  listOfApiserver,
  listRequest,
  objectOf,
  statusesOf,
  type ObjectList,
  type ResourceStatus,
} from "./messages.js";
import { KubeObject, type AnyValue } from "./objects.js";
import {
  OnExpired,
  type CallOptions,
  type GetOptions,
  type InformerOptions,
  type ListOptions,
  type WatchOptions,
} from "./options.js";
import { checkOptions } from "./option-checks.js";
import { WatchItems, WatchStream } from "./watch.js";

/**
 * A client of one kubefan. All its calls share a connection to each address of the name.
 *
 * It connects with the first call, and again whenever the connection broke. Call `close` at the
 * end, or use `await using`.
 */
export class Client implements AsyncDisposable {
  readonly address: string;
  readonly #connection: Connection;

  /**
   * Makes a client that connects with its first call: a watch waits for the server.
   *
   * `address` is `host:port`, `https://host:port`, `dns:host:port` or `unix:/path`. Throws
   * `InvalidAddress`.
   */
  constructor(address: string, options: ClientOptions = {}) {
    checkOptions("client", options);
    this.address = address;
    this.#connection = new Connection(address, options);
  }

  /**
   * Connects now. Rejects with `Unreachable` or `ProtocolError` if kubefan is not there. With an
   * apiserver, a kubefan that cannot be reached is no error.
   */
  static async connect(address: string, options: ClientOptions = {}): Promise<Client> {
    const client = new Client(address, options);
    try {
      await client.#askResources(undefined, true);
    } catch (error) {
      // Another error comes from kubefan, so it is reachable. Some callers may not list its caches.
      if (error instanceof Unreachable || error instanceof ProtocolError) {
        if (client.#connection.fallback?.note(error, 0, "list_resources") === "away") {
          // Reads go to the apiserver.
          return client;
        }
        client.close();
        throw error;
      }
    }
    return client;
  }

  /**
   * A client for a pod: kubefan's Service, with the token of the pod's service account. It connects
   * with its first call. docs/attach.md says how a pod gets kubefan's CA.
   */
  static inCluster(address = "", options: ClientOptions = {}): Client {
    return new Client(address === "" ? IN_CLUSTER_ADDRESS : address, inClusterOptions(options));
  }

  /** Lists objects, at one version and in key order. */
  async list<T extends object = AnyValue>(
    resource: string,
    options: ListOptions = {},
  ): Promise<ObjectList<T>> {
    checkOptions("list", options);
    const request = listRequest(resource, options);
    const ask = async (call: RpcOptions): Promise<ObjectList<T>> => {
      const reader = new ListReader<T>();
      for await (const chunk of this.#connection.rpc.list(request, call)) {
        reader.accept(chunk);
      }
      const found = reader.result();
      if (found === undefined) {
        const problem = "a list without a resource version";
        throw new ProtocolError(`${this.address} does not speak kubefan's protocol: ${problem}`);
      }
      this.#connection.fallback?.remember(resource, options, found.resource);
      return found;
    };
    const { projection = {} } = options;
    const direct = async (reads: FallbackReads, signal: AbortSignal): Promise<ObjectList<T>> =>
      listOfApiserver<T>(
        await reads.apiserver.list(reads.read(resource, options, projection, signal)),
      );
    const kind = kindOf("list", resource, options);
    return this.#connection.either({ kind, ask, direct }, options.signal);
  }

  /** Gets one object. Rejects with `NotFound`. */
  async get<T extends object = AnyValue>(
    resource: string,
    name: string,
    namespace = "",
    options: GetOptions = {},
  ): Promise<KubeObject<T>> {
    checkOptions("get", options);
    const request = getRequest(resource, name, namespace, options);
    const ask = async (call: RpcOptions): Promise<KubeObject<T>> => {
      const { object } = await this.#connection.rpc.get(request, call);
      if (object === undefined) {
        const problem = "an answer without an object";
        throw new ProtocolError(`${this.address} does not speak kubefan's protocol: ${problem}`);
      }
      return objectOf<T>(object);
    };
    const { projection = {} } = options;
    const target = { ...options, name, namespace };
    const direct = async (reads: FallbackReads, signal: AbortSignal): Promise<KubeObject<T>> =>
      (await reads.apiserver.get(
        reads.read(resource, target, projection, signal),
      )) as KubeObject<T>;
    const kind = kindOf("get", resource, options);
    return this.#connection.either({ kind, ask, direct }, options.signal);
  }

  /** The state of each cache, ordered by name. */
  async listResources(options: CallOptions = {}): Promise<ResourceStatus[]> {
    checkOptions("listResources", options);
    return this.#askResources(options.signal, false);
  }

  /**
   * Watches objects: first those that exist, as ADDED, then every change.
   *
   * The stream resumes by itself after a break. If it has to start over, it only has the changes,
   * with DELETED events for objects that are gone. With a `resourceVersion`, `onExpired` is FAIL by
   * default: only the caller knows its objects at that version, so only it can tell which are gone.
   */
  watch<T extends object = AnyValue>(
    resource: string,
    options: WatchOptions = {},
  ): WatchStream<T> {
    return new WatchStream<T>(this.watchItems<T>(resource, options));
  }

  /**
   * As `watch`, with everything that the server and the connection say. Snapshots, gaps and
   * catch-ups have marks; the caller applies them as units.
   */
  watchItems<T extends object = AnyValue>(
    resource: string,
    options: WatchOptions = {},
  ): WatchItems<T> {
    checkOptions("watch", options);
    const resumes = options.resourceVersion !== undefined && options.resourceVersion !== "";
    return new WatchItems<T>(
      this.#connection,
      resource,
      resumes ? { onExpired: OnExpired.FAIL, ...options } : options,
    );
  }

  /**
   * An informer: a store that is kept equal to the server's state, and handlers. It starts with
   * `start`. With a projection, `onlyChanges` is true by default.
   */
  informer<T extends object = AnyValue>(
    resource: string,
    options: InformerOptions = {},
  ): Informer<T> {
    checkOptions("informer", options);
    return new Informer<T>(this.#connection, resource, options);
  }

  /** Closes the connection, and ends all its calls, watches and informers. */
  close(): void {
    this.#connection.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    this.close();
    return Promise.resolve();
  }

  /** @internal What a log shows: nothing of the token. */
  [inspect.custom](): string {
    return `Client("${this.address}")`;
  }

  async #askResources(
    signal: AbortSignal | undefined,
    isConnecting: boolean,
  ): Promise<ResourceStatus[]> {
    const rpc = this.#connection.rpc;
    return this.#connection.call(
      async (call) => statusesOf(await rpc.listResources({}, call)),
      signal,
      isConnecting,
    );
  }
}
