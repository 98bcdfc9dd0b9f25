// The TypeScript runner of the script in clients/conformance: it reads commands as lines of JSON,
// and writes the client's reports as lines of JSON. clients/conformance/README.md describes the
// lines.

import { createInterface } from "node:readline";
import * as zlib from "node:zlib";
import {
  Apiserver,
  Client,
  Expired,
  KubefanError,
  type ApiserverOptions,
  type Budget,
  type ClientOptions,
  type Encoding,
  type Fallback,
  type Informer,
  type KubeObject,
  type ListOptions,
  type OnExpired,
  type OnLag,
  type Projection,
  type Registration,
  type WatchItem,
  type WatchItems,
  type WatchOptions,
  type WatchStream,
} from "../../src/index.js";

const SYNC_MS_MAX = 60_000;

type Line = Record<string, unknown>;

/** The fields of all commands. */
interface Command {
  readonly id: number;
  readonly op: string;
  readonly as?: string;
  readonly of?: string;
  readonly client?: string;
  readonly address?: string;
  readonly lazy?: boolean;
  readonly ca_file?: string;
  readonly server_name?: string;
  readonly token?: string;
  readonly token_file?: string;
  readonly connect_timeout_ms?: number;
  readonly keepalive_interval_ms?: number;
  readonly keepalive_timeout_ms?: number;
  readonly resource?: string;
  readonly namespace?: string;
  readonly name?: string;
  readonly label_selector?: string;
  readonly field_selector?: string;
  readonly resource_version?: string;
  readonly cluster?: string;
  readonly timeout_ms?: number;
  readonly bookmark_interval_ms?: number;
  readonly fields?: string[];
  readonly metadata_only?: boolean;
  readonly drop_managed_fields?: boolean;
  readonly only_changes?: boolean;
  readonly encoding?: Encoding;
  readonly on_expired?: OnExpired;
  readonly on_lag?: OnLag;
  readonly quiet?: boolean;
  readonly fallback?: Fallback;
  readonly apiserver?: string;
  readonly apiserver_ca_file?: string;
  readonly apiserver_token?: string;
  readonly budget_clients?: number;
  readonly budget_rate?: number;
}

/** Reports of quiet sources: the number of each item. */
const counts = new Map<string, Record<string, number>>();

function say(line: Line): void {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

function report(from: string, item: Line & { readonly item: string }): void {
  const quiet = counts.get(from);
  if (quiet !== undefined) {
    quiet[item.item] = (quiet[item.item] ?? 0) + 1;
    return;
  }
  say({ ...item, from });
}

function shown(error: unknown): Line {
  if (!(error instanceof KubefanError)) {
    return { code: "UNKNOWN", message: String(error) };
  }
  const { name, code, reason, field, isRetryable, message } = error;
  const expired = error instanceof Expired;
  return { class: name, code, reason, field, expired, retryable: isRetryable, message };
}

function shownObject(object: KubeObject): Line {
  return { key: object.key, object: new TextDecoder().decode(object.raw) };
}

function shownItem(item: WatchItem): Line & { readonly item: string } {
  switch (item.kind) {
    case "event":
      return {
        ...shownObject(item.object),
        item: "event",
        type: item.type,
        delete_reason: item.deleteReason ?? "UNSPECIFIED",
        uid: item.object.uid,
        version: item.object.resourceVersion,
      };
    case "snapshotBegin":
      return { item: "snapshot_begin", restarted_from: item.restartedFrom };
    case "snapshotEnd":
      return { item: "snapshot_end", count: item.objectCount };
    case "gapBegin":
      return { item: "gap_begin", reason: item.reason };
    case "disconnected":
      return { item: "disconnected", error: shown(item.error) };
    case "restarted":
      return { item: "restarted", error: shown(item.error) };
    case "gapEnd":
      return { item: "gap_end" };
    case "catchUpBegin":
      return { item: "catch_up_begin" };
    case "catchUpEnd":
      return { item: "catch_up_end" };
    case "bookmark":
    case "reconnected":
      return { item: item.kind };
  }
}

/** Reports every item of a watch. */
async function follow(from: string, watch: WatchItems | WatchStream): Promise<void> {
  try {
    for await (const item of watch) {
      report(from, { ...shownItem(item), resume: watch.resumeVersion, cluster: watch.cluster });
    }
  } catch (error) {
    report(from, { item: "failed", error: shown(error) });
  }
  report(from, { item: "end" });
}

/** A copy without the fields that are not given. */
function given<T extends object>(fields: { [K in keyof T]: T[K] | undefined }): T {
  return Object.fromEntries(Object.entries(fields).filter(([, it]) => it !== undefined)) as T;
}

/** The options of the fallback. */
function fallbackOptions(command: Command): ClientOptions {
  const { apiserver, apiserver_ca_file: caFile, apiserver_token: token } = command;
  if (apiserver === undefined) {
    return {};
  }
  const budget = given<Budget>({ clients: command.budget_clients, rate: command.budget_rate });
  const credentials = given<ApiserverOptions>({ caFile, token });
  return { apiserver: new Apiserver(apiserver, credentials), budget };
}

function clientOptions(command: Command): ClientOptions {
  return given<ClientOptions>({
    caFile: command.ca_file,
    serverName: command.server_name,
    token: command.token,
    tokenFile: command.token_file,
    connectTimeoutMs: command.connect_timeout_ms,
    keepaliveIntervalMs: command.keepalive_interval_ms,
    keepaliveTimeoutMs: command.keepalive_timeout_ms,
  });
}

function projection(command: Command): Projection {
  return given<Projection>({
    paths: command.fields,
    metadataOnly: command.metadata_only,
    dropManagedFields: command.drop_managed_fields,
  });
}

function listOptions(command: Command): ListOptions {
  return given<ListOptions>({
    namespace: command.namespace,
    name: command.name,
    labelSelector: command.label_selector,
    fieldSelector: command.field_selector,
    resourceVersion: command.resource_version,
    projection: projection(command),
  });
}

function watchOptions(command: Command): WatchOptions {
  const options = given<WatchOptions>({
    cluster: command.cluster,
    timeoutMs: command.timeout_ms,
    bookmarkIntervalMs: command.bookmark_interval_ms,
    onlyChanges: command.only_changes,
    encoding: command.encoding,
    onExpired: command.on_expired,
    onLag: command.on_lag,
    fallback: command.fallback,
  });
  return { ...listOptions(command), ...options, backoff: { initialMs: 50, maxMs: 500 } };
}

function need<T>(from: Map<string, T>, name: string | undefined): T {
  const found = from.get(name ?? "");
  if (found === undefined) {
    throw new Error(`there is no ${name ?? "name"}`);
  }
  return found;
}

class Runner {
  readonly #clients = new Map<string, Client>();
  readonly #watches = new Map<string, { close: () => void; ended: Promise<void> }>();
  readonly #informers = new Map<string, Informer>();
  readonly #registrations = new Map<string, Registration>();

  async run(command: Command): Promise<Line> {
    const { op, as: name = "", resource = "" } = command;
    if (command.quiet === true) {
      counts.set(name, {});
    }
    switch (op) {
      case "connect": {
        const { address = "", lazy } = command;
        const options = { ...clientOptions(command), ...fallbackOptions(command) };
        const client =
          lazy === true ? new Client(address, options) : await Client.connect(address, options);
        this.#clients.set(name, client);
        break;
      }
      case "list": {
        const found = await this.#client(command).list(resource, listOptions(command));
        const { resourceVersion, cluster, objects } = found;
        return { version: resourceVersion, cluster, objects: objects.map(shownObject) };
      }
      case "get": {
        const { name: object = "", namespace = "" } = command;
        const options = { projection: projection(command) };
        const found = await this.#client(command).get(resource, object, namespace, options);
        return { objects: [shownObject(found)] };
      }
      case "list_resources": {
        const caches = await this.#client(command).listResources();
        return { resources: caches.map((it) => it.resource?.resource) };
      }
      case "watch":
        this.#follow(name, this.#client(command).watchItems(resource, watchOptions(command)));
        break;
      case "changes":
        this.#follow(name, this.#client(command).watch(resource, watchOptions(command)));
        break;
      case "informer":
        this.#inform(command, name);
        break;
      case "handler":
        this.#handle(need(this.#informers, command.of), name);
        break;
      case "wait_for_sync":
        await need(this.#registrations, name).waitForSync({ timeoutMs: SYNC_MS_MAX });
        break;
      case "wait_until": {
        const informer = need(this.#informers, name);
        const version = command.resource_version ?? "";
        return { reached: await informer.waitUntil(version, { timeoutMs: SYNC_MS_MAX }) };
      }
      case "store": {
        const stored = need(this.#informers, name).indexer.list();
        const entries = stored.map((it) => [it.key, [it.resourceVersion, it.uid]] as const);
        return { objects: Object.fromEntries(entries) };
      }
      case "counts":
        return { counts: need(counts, name) };
      case "close":
        await this.#close(name);
        break;
      case "reset":
        for (const each of [this.#watches, this.#informers, this.#clients]) {
          for (const key of [...each.keys()]) {
            await this.#close(key);
          }
        }
        this.#registrations.clear();
        counts.clear();
        break;
      default:
        throw new Error(`${op} is no command`);
    }
    return {};
  }

  #client(command: Command): Client {
    return need(this.#clients, command.client);
  }

  #follow(name: string, watch: WatchItems | WatchStream): void {
    const close = (): void => {
      watch.close();
    };
    this.#watches.set(name, { close, ended: follow(name, watch) });
  }

  #inform(command: Command, name: string): void {
    const informer = this.#client(command).informer(
      command.resource ?? "",
      watchOptions(command),
    );
    informer.onError((error) => {
      report(name, { item: "error", error: shown(error) });
    });
    this.#informers.set(name, informer);
    this.#handle(informer, name);
    informer.start();
  }

  #handle(informer: Informer, from: string): void {
    const registration = informer.addEventHandler({
      onAdd: ({ key, resourceVersion }, initial) => {
        report(from, { item: "add", key, initial, version: resourceVersion });
      },
      onUpdate: (old, { key, resourceVersion }) => {
        report(from, { item: "update", key, version: resourceVersion, old: old.resourceVersion });
      },
      onDelete: ({ key, finalStateUnknown }) => {
        report(from, { item: "delete", key, unknown: finalStateUnknown });
      },
    });
    this.#registrations.set(from, registration);
  }

  async #close(name: string): Promise<void> {
    const watch = this.#watches.get(name);
    const informer = this.#informers.get(name);
    watch?.close();
    await watch?.ended;
    if (informer !== undefined) {
      await informer.stop();
      report(name, { item: "end" });
    }
    this.#clients.get(name)?.close();
    for (const each of [this.#watches, this.#informers, this.#clients]) {
      each.delete(name);
    }
  }
}

/** The encodings that this Node cannot decompress. The README says which Node can. */
function lacks(): string[] {
  const [major = 0, minor = 0] = process.versions.node.split(".").map(Number);
  const since = (line: number, first: number): boolean => major === line && minor >= first;
  const hasDeltas = since(22, 19) || since(24, 6) || major > 24;
  return ["zstdDecompressSync" in zlib ? "" : "zstd", hasDeltas ? "" : "zstd-delta"].filter(
    (it) => it !== "",
  );
}

say({ language: "typescript", lacks: lacks() });
const runner = new Runner();
for await (const text of createInterface({ input: process.stdin })) {
  const command = JSON.parse(text) as Command;
  try {
    say({ id: command.id, ok: await runner.run(command) });
  } catch (error) {
    say({ id: command.id, error: shown(error) });
  }
}
process.exit();
