// The state machine of a watch, without I/O and without a clock.
//
// Every message that can be resumed from carries a `resumeVersion`. The machine keeps the last one,
// and asks with it for the rest after a break: the server then sends exactly the changes in
// between. It never resumes from an object's own version, because that does not say which changes
// the selector has already covered.
//
// `WatchItems` drives it: it opens the calls that the machine asks for, and passes messages to it
// as they arrive, with the time in milliseconds.

import { create } from "@bufbuild/protobuf";
import { DurationSchema } from "@bufbuild/protobuf/wkt";
import { Backoff } from "./backoff.js";
import { DeltaBase, DeltaError, OverLimitError, decodeChunk } from "./delta.js";
import { Expired, Unauthenticated, Undecodable, Unreachable, type KubefanError } from "./errors.js";
import * as api from "./gen/kubefan/v1alpha1/watch_pb.js";
import type { Resource, WatchEvent, WatchItem } from "./items.js";
import { DeleteReason, EventType, KubeObject } from "./objects.js";
import {
  DELTA_BASE_BYTES_MAX,
  Encoding,
  OnExpired,
  OnLag,
  leavesOut,
  projectionMessage,
  targetMessage,
  type WatchOptions,
} from "./options.js";
import { ErrorReason } from "./reasons.js";
import { receivedVersion, sentVersion } from "./resume-version.js";
import { nodeZstd, type Zstd } from "./zstd.js";

/**
 * A stream lives between this long and twice as long, then the watch resumes on another one. A
 * proxy in between may keep a connection open that leads nowhere, and answer its PINGs.
 */
export const STREAM_MS_MIN = 300_000;
/** The server ends a stream at its timeout. If it is this late, the client ends it. */
export const TIMEOUT_GRACE_MS = 2_000;
/** Clocks of two machines differ by this much over the life of a stream. */
const CLOCK_MS = 100;
/** The reasons of a stream that the server asks to continue on a new connection, at once. */
const MOVED: ReadonlySet<string> = new Set([ErrorReason.REBALANCED, ErrorReason.CONNECTION_AGE]);
/**
 * A stream that is moved sooner than this after it was opened has failed: otherwise a server that
 * moves every stream would be asked in a tight loop.
 */
const MOVED_AFTER_MS = 5_000;
/** A stream that ends sooner, without a message, counts as failed. */
const SHORT_STREAM_MS = 1_000;

const TYPES: ReadonlyMap<api.EventType, EventType> = new Map([
  [api.EventType.ADDED, EventType.ADDED],
  [api.EventType.MODIFIED, EventType.MODIFIED],
  [api.EventType.DELETED, EventType.DELETED],
]);
const REASONS: ReadonlyMap<api.DeleteReason, DeleteReason> = new Map([
  [api.DeleteReason.OBJECT_DELETED, DeleteReason.OBJECT_DELETED],
  [api.DeleteReason.LEFT_SELECTOR, DeleteReason.LEFT_SELECTOR],
  [api.DeleteReason.FINAL_STATE_UNKNOWN, DeleteReason.FINAL_STATE_UNKNOWN],
]);

/** Settings that a test of the machine may change. */
export interface Surroundings {
  readonly address?: string;
  readonly random?: () => number;
  readonly zstd?: Zstd | undefined;
}

/** The state of one watch. */
export class WatchState {
  readonly #target: api.Target;
  readonly #options: WatchOptions;
  readonly #address: string;
  readonly #random: () => number;
  readonly #zstd: Zstd | undefined;
  readonly #backoff: Backoff;
  #resumeVersion: string;
  #cluster: string;
  #ended = false;
  #nextCluster: string | undefined;
  #deadline: number | undefined;
  #wakeAt: number | undefined;
  #isBroken = false;
  #openedAt: number | undefined;
  #wasOpen = false;
  #hasReceived = false;
  #streamDeadline: number | undefined;
  #deltas: DeltaBase | undefined;
  /** Whether the delta base is the state at exactly `resumeVersion`, and not a later one. */
  #areDeltasCurrent = false;

  constructor(resource: string, options: WatchOptions, surroundings: Surroundings = {}) {
    this.#target = targetMessage(resource, options);
    // Throws now for a projection that contradicts itself, not with the first call.
    projectionMessage(options.projection ?? {});
    this.#options = options;
    this.#address = surroundings.address ?? "kubefan";
    this.#random = surroundings.random ?? Math.random;
    this.#zstd = "zstd" in surroundings ? surroundings.zstd : nodeZstd();
    this.#backoff = new Backoff(options.backoff, this.#random);
    this.#resumeVersion = options.resourceVersion ?? "";
    this.#cluster = options.cluster ?? "";
    if (options.encoding === Encoding.ZSTD_DELTA && this.#zstd?.hasDictionaries === true) {
      this.#deltas = new DeltaBase(this.#zstd, options.deltaBaseBytesMax ?? DELTA_BASE_BYTES_MAX);
    }
  }

  /** The last version to resume from. Empty until the first snapshot is complete. */
  get resumeVersion(): string {
    return this.#resumeVersion;
  }

  /** The cluster of that version. */
  get cluster(): string {
    return this.#cluster;
  }

  /** Whether the watch has ended, by its timeout or an error. */
  get ended(): boolean {
    return this.#ended;
  }

  /** Whether the call has been answered. */
  get isOpen(): boolean {
    return this.#openedAt !== undefined;
  }

  /** The time to wait before the next call. */
  delay(now: number): number {
    this.#begin(now);
    if (this.#wakeAt === undefined) {
      return 0;
    }
    return Math.max(0, Math.min(this.#wakeAt, this.#deadline ?? Infinity) - now);
  }

  /** The request of the next call, for the rest of the watch. Undefined after its timeout. */
  request(now: number): api.WatchRequest | undefined {
    this.#begin(now);
    this.#openedAt = undefined;
    this.#hasReceived = false;
    if (this.#deadline !== undefined && now >= this.#deadline) {
      this.#ended = true;
      return undefined;
    }
    const limit = now + STREAM_MS_MIN * (1 + this.#random());
    this.#streamDeadline = Math.min(limit, this.#deadline ?? Infinity);
    if (!this.#areDeltasCurrent) {
      // They have parts of a span that broke off, which no later message need undo.
      this.#deltas?.clear();
    }
    const options = this.#options;
    const { encoding, isCanonical } = this.#encoding();
    const projection = options.projection ?? {};
    const onlyChanges = options.onlyChanges === true;
    const onExpired = options.onExpired ?? OnExpired.RESTART;
    const { version, isComplete } = sentVersion(this.#resumeVersion);
    const request = create(api.WatchRequestSchema, {
      target: this.#target,
      resourceVersion: version,
      ...(isComplete === undefined ? {} : { versionIsComplete: isComplete }),
      cluster: this.#cluster,
      timeoutSeconds: BigInt(Math.ceil((this.#streamDeadline - now) / 1_000)),
      encoding,
      stateKept: this.#deltas?.complete === true,
      onLag: options.onLag === OnLag.EXPIRE ? api.OnLag.EXPIRE : api.OnLag.CONFLATE,
      onExpired: onExpired === OnExpired.RESTART ? api.OnExpired.RESTART : api.OnExpired.FAIL,
    });
    if (options.bookmarkIntervalMs !== undefined) {
      request.bookmarkInterval = create(DurationSchema, {
        seconds: BigInt(Math.floor(options.bookmarkIntervalMs / 1_000)),
        nanos: Math.round((options.bookmarkIntervalMs % 1_000) * 1e6),
      });
    }
    if (leavesOut(projection) || onlyChanges || isCanonical) {
      request.projection = projectionMessage(projection, onlyChanges, isCanonical);
    }
    return request;
  }

  /** The limit of the call, a little later than the server's own. */
  callMs(now: number): number {
    const seconds = Math.ceil(((this.#streamDeadline ?? now) - now) / 1_000);
    return Math.max(0, seconds) * 1_000 + TIMEOUT_GRACE_MS;
  }

  /** The call has been answered. */
  opened(now: number): WatchItem[] {
    this.#openedAt = now;
    this.#wasOpen = true;
    this.#nextCluster = undefined;
    return this.reconnected();
  }

  /** A server answers again. */
  reconnected(): WatchItem[] {
    if (!this.#isBroken) {
      return [];
    }
    this.#isBroken = false;
    return [{ kind: "reconnected", since: this.#resumeVersion, resumeVersion: "" }];
  }

  /** The apiserver has brought everything up to this version. */
  movedTo(version: string, cluster = this.#cluster): void {
    this.#resumeVersion = version;
    this.#cluster = cluster;
    this.#areDeltasCurrent = false;
  }

  /** The time until another attempt at the apiserver. */
  pauseMs(now: number): number {
    return this.#backoff.nextDelay(now);
  }

  /** Asks kubefan within two first delays. All watches of a client learn of its return. */
  soon(now: number): void {
    const { initialMs = 800 } = this.#options.backoff ?? {};
    if (this.#wakeAt !== undefined) {
      this.#wakeAt = Math.min(this.#wakeAt, now + 2 * initialMs * this.#random());
    }
  }

  /** Whether the timeout of the watch has passed. Then it has ended. */
  isOver(now: number): boolean {
    this.#begin(now);
    this.#ended ||= this.#deadline !== undefined && now >= this.#deadline;
    return this.#ended;
  }

  /** The time until the timeout of the watch; undefined without one. */
  msLeft(now: number): number | undefined {
    this.#begin(now);
    return this.#deadline === undefined ? undefined : Math.max(0, this.#deadline - now);
  }

  /**
   * Applies a message and returns its items.
   *
   * If the last one is `disconnected`, the message cannot be decoded, and the call must be
   * cancelled: the next one gets the message again, with whole objects.
   */
  accept(response: api.WatchResponse, now: number): WatchItem[] {
    let items = this.#openedAt === undefined ? this.opened(now) : [];
    this.#hasReceived = true;
    const resumeVersion = receivedVersion(response.resumeVersion, response.versionIsComplete);
    try {
      items = items.concat(this.#items(response, resumeVersion));
    } catch (error) {
      if (!(error instanceof DeltaError)) {
        throw error;
      }
      items.push(this.#undecodable(error, now));
      return items;
    }
    this.#areDeltasCurrent = resumeVersion !== "";
    if (resumeVersion !== "") {
      this.#resumeVersion = resumeVersion;
      if (this.#nextCluster !== undefined) {
        this.#cluster = this.#nextCluster;
        this.#nextCluster = undefined;
      }
    }
    return items;
  }

  /** The stream has ended without an error. */
  finished(now: number): WatchItem[] {
    if (this.#deadline !== undefined && now >= this.#deadline - CLOCK_MS) {
      this.#ended = true;
      return [];
    }
    const lived = this.#openedAt === undefined ? 0 : now - this.#openedAt;
    if (this.#hasReceived || lived >= SHORT_STREAM_MS) {
      // Its time was over.
      this.#wakeAt = undefined;
      return [];
    }
    const text = `cannot reach kubefan at ${this.#address}: the stream ended at once`;
    return this.failed(new Unreachable(text), now);
  }

  /**
   * The call has failed. Throws the error if a retry cannot resolve it. If another server may be
   * asked (`isCertain` is false), only a version that has expired is thrown.
   */
  failed(
    error: KubefanError,
    now: number,
    tokenMayChange = false,
    isCertain = true,
  ): WatchItem[] {
    const isOwnLimit = error.reason === "" || error.reason === ErrorReason.DEADLINE_EXCEEDED;
    if (error.code === "DEADLINE_EXCEEDED" && isOwnLimit) {
      // The call's own limit, which the server has missed.
      this.#hasReceived = true;
      return this.finished(now);
    }
    const lived = this.#openedAt === undefined ? 0 : now - this.#openedAt;
    if (MOVED.has(error.reason) && lived >= MOVED_AFTER_MS) {
      // Nothing was lost, and nothing has failed.
      this.#wakeAt = undefined;
      return [];
    }
    const restarts = this.#options.onExpired !== OnExpired.FAIL && error instanceof Expired;
    // The file may get another token. A token that was never accepted is a mistake, though.
    const mayLogIn = error instanceof Unauthenticated && this.#wasOpen && tokenMayChange;
    const isFinal = isCertain || error instanceof Expired;
    if (isFinal && !restarts && !mayLogIn && !error.isRetryable) {
      this.#ended = true;
      throw error;
    }
    // A restart is delayed too: otherwise, with a history that is too short, clients would read
    // snapshots in a tight loop.
    const retryInMs = this.#backoff.nextDelay(now, error.retryAfterMs);
    this.#wakeAt = now + retryInMs;
    this.#isBroken = true;
    if (restarts) {
      this.#resumeVersion = "";
      this.#cluster = "";
      this.#areDeltasCurrent = false;
    }
    return [{ kind: restarts ? "restarted" : "disconnected", error, retryInMs, resumeVersion: "" }];
  }

  #begin(now: number): void {
    if (this.#deadline === undefined && this.#options.timeoutMs !== undefined) {
      this.#deadline = now + this.#options.timeoutMs;
    }
  }

  /** The encoding to request: the chosen one, or the nearest one that can be decoded. */
  #encoding(): { encoding: api.Encoding; isCanonical: boolean } {
    if (this.#deltas !== undefined) {
      return { encoding: api.Encoding.ZSTD_DELTA, isCanonical: false };
    }
    const chosen = this.#options.encoding ?? Encoding.JSON;
    const isCompressed = chosen !== Encoding.JSON && this.#zstd !== undefined;
    return {
      encoding: isCompressed ? api.Encoding.ZSTD : api.Encoding.JSON,
      // Without deltas, this asks for the same bytes that they would produce.
      isCanonical: chosen === Encoding.ZSTD_DELTA,
    };
  }

  #undecodable(error: DeltaError, now: number): WatchItem {
    if (error instanceof OverLimitError) {
      this.#deltas = undefined;
    }
    this.#areDeltasCurrent = false;
    this.#isBroken = true;
    const retryInMs = this.#backoff.nextDelay(now);
    this.#wakeAt = now + retryInMs;
    const text = `cannot decode a message from kubefan at ${this.#address}: ${error.message}`;
    return { kind: "disconnected", error: new Undecodable(text), retryInMs, resumeVersion: "" };
  }

  #items(response: api.WatchResponse, resumeVersion: string): WatchItem[] {
    const message = response.message;
    switch (message.case) {
      case "event": {
        const event = this.#event(message.value, resumeVersion);
        return event === undefined ? [] : [event];
      }
      case "snapshotChunk":
        return decodeChunk(this.#zstd, message.value.zstd)
          .map((event) => this.#event(event, ""))
          .filter((event) => event !== undefined);
      case "snapshotBegin": {
        const { resourceVersion, restartedFrom, resource, cluster } = message.value;
        this.#deltas?.clear();
        this.#nextCluster = cluster;
        const found = resource === undefined ? {} : { resource: resourceOf(resource) };
        return [
          { kind: "snapshotBegin", resourceVersion, restartedFrom, ...found, resumeVersion },
        ];
      }
      case "snapshotEnd":
        this.#deltas?.endSnapshot();
        return [
          { kind: "snapshotEnd", objectCount: Number(message.value.objectCount), resumeVersion },
        ];
      case "gapBegin": {
        const { resourceVersion, reason } = message.value;
        return [{ kind: "gapBegin", resourceVersion, reason, resumeVersion: "" }];
      }
      case "gapEnd":
        return [{ kind: "gapEnd", resumeVersion }];
      case "catchUpBegin": {
        const { resourceVersion } = message.value;
        return [{ kind: "catchUpBegin", resourceVersion, resumeVersion: "" }];
      }
      case "catchUpEnd":
        return [{ kind: "catchUpEnd", resumeVersion }];
      default:
        // A bookmark, or an unknown message of a newer server. Its version counts in any case.
        return [{ kind: "bookmark", resumeVersion }];
    }
  }

  #event(event: api.Event, resumeVersion: string): WatchEvent | undefined {
    let raw: Uint8Array;
    if (this.#deltas !== undefined) {
      raw = this.#deltas.resolve(event);
    } else if (event.delta !== undefined) {
      throw new DeltaError("a delta arrived, but none was asked for");
    } else {
      // A copy: the event's bytes are a part of the whole message, which would stay in memory.
      raw = new Uint8Array(event.object);
    }
    const type = TYPES.get(event.type);
    if (type === undefined) {
      return undefined;
    }
    const { namespace, name, uid, resourceVersion } = event;
    const object = new KubeObject(namespace, name, uid, resourceVersion, raw);
    const deleteReason = REASONS.get(event.deleteReason);
    const reason = deleteReason === undefined ? {} : { deleteReason };
    return { kind: "event", type, object, ...reason, resumeVersion };
  }
}

/** A resource as kubefan resolved it. */
export function resourceOf(resource: api.ResolvedResource): Resource {
  const { group, version, kind, namespaced } = resource;
  return { group, version, resource: resource.resource, kind, namespaced };
}
