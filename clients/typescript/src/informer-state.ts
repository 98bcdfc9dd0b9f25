// The state machine of an informer: items of a watch become changes of its store, and calls.
//
// It has no I/O. The hazard is a store that silently differs from the server. So a version counts
// only after everything at or below it is in the store, and a snapshot, a gap or a catch-up that
// breaks off has no effect.

import { Backoff } from "./backoff.js";
import { Expired, Unauthenticated, Unreachable, type KubefanError } from "./errors.js";
import type { Notification } from "./handlers.js";
import type { WatchEvent, WatchItem } from "./items.js";
import { DeleteReason, EventType, type AnyValue, type KubeObject } from "./objects.js";
import {
  leavesOut,
  projectionMessage,
  type InformerOptions,
  type WatchOptions,
} from "./options.js";
import { ErrorReason } from "./reasons.js";
import { Store } from "./store.js";

/**
 * A state older than a version that is already known is refused this often. Replicas catch up
 * sooner. A cluster that was restored from a backup may not for a long time.
 */
export const OLD_SNAPSHOTS_MAX = 10;
const DECIMAL = /^[0-9]+$/;

/**
 * A version as a number; undefined if it is none. A place inside it, which a version to resume from
 * may have ("218.1", "218.end"), does not count.
 */
export function versionNumber(version: string): bigint | undefined {
  const [whole = ""] = version.split(".", 1);
  return DECIMAL.test(whole) ? BigInt(whole) : undefined;
}

/** The store, and how far it is. */
export class InformerState<T extends object = AnyValue> {
  readonly store: Store<T>;
  readonly #options: WatchOptions;
  readonly #backoff: Backoff;
  #resourceVersion = "";
  #isSynced = false;
  #version = "";
  #cluster = "";
  #snapshot: Map<string, KubeObject<T>> | undefined;
  #unit: WatchEvent<T>[] | undefined;
  #expired = 0n;
  #refused = 0;

  constructor(options: InformerOptions, observer?: (error: unknown) => void) {
    for (const name of ["resourceVersion", "cluster", "timeoutMs"]) {
      if (Object.hasOwn(options, name)) {
        throw new TypeError(`an informer has no ${name}: it starts with the present state`);
      }
    }
    // Throws now for a projection that contradicts itself, not with the first call.
    projectionMessage(options.projection ?? {});
    const isReduced = leavesOut(options.projection ?? {});
    this.#options = isReduced ? { onlyChanges: true, ...options } : options;
    this.#backoff = new Backoff(options.backoff);
    this.store = new Store<T>(observer);
  }

  /** Everything at or below this version is in the store. */
  get resourceVersion(): string {
    return this.#resourceVersion;
  }

  /** Whether the first state is complete. */
  get isSynced(): boolean {
    return this.#isSynced;
  }

  /** The options of the next watch. */
  options(): WatchOptions {
    return { ...this.#options, resourceVersion: this.#version, cluster: this.#cluster };
  }

  /** A watch has ended with an error, at `version`. The delay before the next. */
  failed(error: KubefanError, version: string, now: number): number {
    this.#snapshot = this.#unit = undefined;
    if (error instanceof Expired) {
      this.#noteExpired(error, version);
    }
    const isMended = error.isRetryable || error instanceof Unauthenticated;
    if (error instanceof Expired || !isMended) {
      // An error that no retry of the same request can fix leads to a new state.
      this.#version = this.#cluster = "";
    }
    return this.#backoff.nextDelay(now, error.retryAfterMs);
  }

  /**
   * Applies an item of a watch of this cluster.
   *
   * Throws `Unreachable` for a state that would go back in time.
   */
  accept(item: WatchItem<T>, cluster: string): Notification<T>[] {
    let calls: Notification<T>[] = [];
    switch (item.kind) {
      case "event":
        if (this.#snapshot !== undefined) {
          this.#collect(item.object, this.#snapshot);
          return calls;
        }
        if (this.#unit !== undefined) {
          this.#unit.push(item);
          return calls;
        }
        calls = this.#apply([item]);
        break;
      case "snapshotBegin":
        this.#check(item.resourceVersion);
        this.#snapshot = new Map();
        this.#unit = undefined;
        break;
      case "snapshotEnd": {
        const snapshot = this.#snapshot;
        this.#snapshot = undefined;
        calls = snapshot === undefined ? [] : this.#replace(snapshot);
        break;
      }
      case "gapBegin":
      case "catchUpBegin":
        this.#unit = [];
        break;
      case "gapEnd":
      case "catchUpEnd": {
        const unit = this.#unit ?? [];
        this.#unit = undefined;
        calls = this.#apply(unit);
        break;
      }
      case "disconnected":
      case "restarted":
        this.#snapshot = this.#unit = undefined;
        if (item.kind === "restarted") {
          this.#noteExpired(item.error, this.#version);
        }
        break;
      default:
    }
    if (item.resumeVersion !== "") {
      this.#version = this.#resourceVersion = item.resumeVersion;
      this.#cluster = cluster;
    }
    return calls;
  }

  #collect(made: KubeObject<T>, snapshot: Map<string, KubeObject<T>>): void {
    // An object that has not changed stays the same one, and takes no memory twice.
    const old = this.store.get(made.key);
    snapshot.set(made.key, old !== undefined && isEqual(old, made) ? old : made);
  }

  #replace(snapshot: Map<string, KubeObject<T>>): Notification<T>[] {
    const changes: [string, KubeObject<T> | undefined][] = [];
    const calls: Notification<T>[] = [];
    for (const old of this.store) {
      if (!snapshot.has(old.key)) {
        changes.push([old.key, undefined]);
        calls.push({ kind: "delete", object: old, finalStateUnknown: true });
      }
    }
    for (const [key, object] of snapshot) {
      const old = this.store.get(key);
      if (old === object) {
        continue;
      }
      changes.push([key, object]);
      calls.push(
        old === undefined
          ? { kind: "add", object, isInInitialList: !this.#isSynced }
          : { kind: "update", old, object },
      );
    }
    this.store.write(changes);
    this.#isSynced = true;
    return calls;
  }

  #apply(events: WatchEvent<T>[]): Notification<T>[] {
    const changes = new Map<string, KubeObject<T> | undefined>();
    const calls: Notification<T>[] = [];
    for (const { type, object, deleteReason } of events) {
      const key = object.key;
      const old = changes.has(key) ? changes.get(key) : this.store.get(key);
      if (type !== EventType.DELETED) {
        if (old === undefined) {
          calls.push({ kind: "add", object, isInInitialList: false });
        } else if (!isEqual(old, object)) {
          calls.push({ kind: "update", old, object });
        }
        changes.set(key, object);
        continue;
      }
      changes.set(key, undefined);
      if (deleteReason !== DeleteReason.FINAL_STATE_UNKNOWN) {
        calls.push({ kind: "delete", object, finalStateUnknown: false });
      } else if (old !== undefined) {
        calls.push({ kind: "delete", object: old, finalStateUnknown: true });
      }
      // Else it was never known here: nothing was deleted for the handlers.
    }
    this.store.write(changes);
    return calls;
  }

  /** Remembers the version, unless another history has replaced its own. */
  #noteExpired(error: KubefanError, version: string): void {
    const known = error.reason === ErrorReason.TOO_OLD ? versionNumber(version) : undefined;
    this.#expired = known ?? 0n;
    this.#refused = 0;
  }

  /** Refuses a state that a replica behind the others sends. */
  #check(version: string): void {
    const number = versionNumber(version);
    const isOld = number !== undefined && number < this.#expired;
    if (!isOld || this.#refused >= OLD_SNAPSHOTS_MAX) {
      this.#expired = 0n;
      this.#refused = 0;
      return;
    }
    this.#refused++;
    throw new Unreachable(
      `this replica is at version ${version}, behind version ${String(this.#expired)}`,
    );
  }
}

function isEqual<T extends object>(one: KubeObject<T>, other: KubeObject<T>): boolean {
  return one.equals(other);
}
