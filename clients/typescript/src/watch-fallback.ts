// The part of a watch that reads from the apiserver.

import type { ApiserverEvent, ApiserverRead } from "./apiserver.js";
import { Expired, KubefanError } from "./errors.js";
import { verdictOf } from "./fallback.js";
import { kindOf, type FallbackReads } from "./fallback-reads.js";
import type { WatchEvent, WatchItem } from "./items.js";
import { DeleteReason, EventType } from "./objects.js";
import type { WatchOptions } from "./options.js";
import { receivedVersion } from "./resume-version.js";
import type { WatchState } from "./watch-state.js";

/** A watch that kubefan has no answer for stays at the apiserver for this long. */
const REFUSED_MS = 300_000;
/** The same after answers that ask to come back later. */
const BUSY_MS = 60_000;
/**
 * A stream that ends sooner, without a message, was never open: the headers of a refusal may arrive
 * before its status.
 */
const SHORT_STREAM_MS = 1_000;

/**
 * The objects that had an event at the last version. Several events may have one version, and the
 * apiserver knows no place between them.
 */
export class AtVersion {
  #version = "";
  readonly #keys = new Set<string>();
  /** The server has changed since, so events of this version may come again. */
  hasMoved = false;

  /** Notes an event. False for one that was returned before. */
  accepts(event: WatchEvent): boolean {
    const { key, resourceVersion } = event.object;
    if (resourceVersion !== this.#version) {
      this.#version = resourceVersion;
      this.hasMoved = false;
      this.#keys.clear();
    }
    if (this.hasMoved && this.#keys.has(key)) {
      return false;
    }
    this.#keys.add(key);
    return true;
  }

  /**
   * The version to watch the apiserver from. After some events of a version it is the one before,
   * so that the others are sent. A place in a version proves that there are others.
   */
  from(resumeVersion: string): string {
    const [version = "", place] = resumeVersion.split(".", 2);
    const isKnown = version === this.#version && this.#keys.size > 0;
    const isPart = place !== "end" && (isKnown || place !== undefined);
    return isPart && /^[0-9]+$/.test(version) ? String(BigInt(version) - 1n) : version;
  }
}

/** A watch of the apiserver in the place of kubefan's. */
export class WatchFallback {
  readonly reads: FallbackReads;
  readonly #state: WatchState;
  readonly #resource: string;
  readonly #options: WatchOptions;
  readonly #closed: AbortSignal;
  #at = new AtVersion();
  #events: AsyncGenerator<ApiserverEvent> | undefined;
  #abort = new AbortController();
  #leaves = false;
  #cancel: () => void = () => undefined;
  /** The time of the next attempt after an error of the apiserver. */
  #retryAt = 0;
  /** The time for which kubefan has no answer for this watch. */
  #refusedUntil = 0;
  #refusedMs = REFUSED_MS;
  readonly #kind: string;
  /** The time of the answer to the watch. */
  #watchOpenedAt = 0;
  /** The caller has a state, although the version has expired. */
  #hadState = false;
  /** The outage before the attempt to open a call. Undefined after its first message. */
  #epoch: number | undefined;
  #openedAt = Infinity;
  /** The outage in which the apiserver has refused this watch. */
  #barredIn: number | undefined;

  constructor(
    reads: FallbackReads,
    state: WatchState,
    resource: string,
    options: WatchOptions,
    closed: AbortSignal,
  ) {
    this.reads = reads;
    this.#state = state;
    this.#resource = resource;
    this.#options = options;
    this.#closed = closed;
    this.#kind = kindOf("watch", resource, options);
    closed.addEventListener("abort", () => {
      this.leave();
    });
  }

  /** Whether the watch reads from the apiserver now. */
  isDirect(now: number): boolean {
    if (this.#events !== undefined) {
      return true;
    }
    const { isHealthy, epoch } = this.reads.monitor;
    return isHealthy ? now < this.#refusedUntil : this.#barredIn !== epoch;
  }

  /** A call of kubefan is about to be made. */
  asks(): void {
    this.#epoch = this.reads.monitor.epoch;
    this.#openedAt = Infinity;
  }

  /** The call was answered. */
  opened(now: number): void {
    this.reads.note(undefined, this.reads.monitor.epoch, this.#kind);
    this.#openedAt = now;
  }

  /** A call of kubefan has failed. Whether kubefan has no answer, and the apiserver is asked. */
  async failed(error: KubefanError, now: number): Promise<boolean> {
    this.#at.hasMoved = true;
    this.#hadState = this.#hasState;
    // For a stream that was open for a while, the attempt to resume decides about kubefan.
    const epoch = now - this.#openedAt >= SHORT_STREAM_MS ? undefined : this.#epoch;
    this.#epoch = undefined;
    let verdict = verdictOf(error);
    let ms = REFUSED_MS;
    if (epoch !== undefined) {
      verdict = this.reads.note(error, epoch, this.#kind);
      if (verdict === "busyForLong") {
        verdict = await this.reads.judge(error, epoch);
        ms = BUSY_MS;
      }
    }
    if (verdict === "refused" && !this.#closed.aborted) {
      if (now >= this.#refusedUntil) {
        this.reads.movesAlone(this.#resource, error);
      }
      this.#refusedMs = ms;
      this.#refusedUntil = performance.now() + ms;
    }
    return verdict === "refused";
  }

  /** The items of kubefan, without events that the apiserver has brought. */
  filtered(items: WatchItem[]): WatchItem[] {
    this.#epoch = undefined;
    return items.filter((item) => {
      if (item.kind === "snapshotBegin") {
        this.reads.remember(this.#resource, this.#options, item.resource);
      }
      if (item.kind === "snapshotEnd" || item.kind === "gapEnd" || item.kind === "catchUpEnd") {
        this.#at = new AtVersion();
        this.#hadState = false;
      }
      return item.kind !== "event" || item.resumeVersion === "" || this.#at.accepts(item);
    });
  }

  /** A step at the apiserver. */
  async step(): Promise<WatchItem[]> {
    return this.#events === undefined ? this.#open() : this.#read(this.#events);
  }

  /** Ends the watch of the apiserver, so that kubefan is asked. */
  leave(): void {
    this.#leaves = true;
    this.#abort.abort();
    this.#cancel();
  }

  get #hasState(): boolean {
    return this.#state.resumeVersion !== "" || this.#hadState;
  }

  async #open(): Promise<WatchItem[]> {
    const now = performance.now();
    if (this.#state.isOver(now)) {
      return [];
    }
    this.#leaves = false;
    this.#abort = new AbortController();
    const signals = [this.#closed, this.#abort.signal];
    const { clock, monitor } = this.reads;
    const ends: (() => void)[] = [];
    const left = this.#state.msLeft(now);
    const limit = left === undefined ? undefined : AbortSignal.timeout(Math.ceil(left));
    const signal = AbortSignal.any(limit === undefined ? signals : [...signals, limit]);
    const isForKubefan = !monitor.isHealthy;
    await new Promise<void>((resolve) => {
      const done = (): void => {
        resolve();
      };
      const stop = clock.callLater(this.#retryAt - now, done);
      const forget = isForKubefan ? monitor.listen(done) : (): void => undefined;
      signal.addEventListener("abort", done, { once: true });
      ends.push(stop, forget, () => {
        signal.removeEventListener("abort", done);
      });
    });
    for (const end of ends) {
      end();
    }
    const start = { hasState: this.#hasState, isForKubefan, signal };
    if (!(await this.reads.start(start))) {
      if (!this.isDirect(performance.now())) {
        this.#state.soon(performance.now());
      }
      return [];
    }
    // Before the requests: an apiserver that accepts them may never answer.
    const leave = (): void => {
      this.leave();
    };
    this.#cancel = isForKubefan
      ? monitor.awaitReturn(leave)
      : clock.callLater(this.#refusedMs, leave);
    if (!isForKubefan) {
      // From its start on, for which it has waited.
      this.#refusedUntil = performance.now() + this.#refusedMs;
    }
    const { projection = {} } = this.#options;
    const read = this.reads.read(this.#resource, this.#options, projection, signal);
    let items: WatchItem[] = [];
    try {
      if (this.#state.resumeVersion === "") {
        items = await this.#list(read);
      }
      const version = this.#at.from(this.#state.resumeVersion);
      this.#events = await this.reads.apiserver.watch(read, version);
    } catch (error) {
      return [...items, ...this.#ended(error)];
    }
    this.#at.hasMoved = true;
    this.#watchOpenedAt = performance.now();
    return items.length > 0 ? items : this.#state.reconnected();
  }

  async #list(read: ApiserverRead): Promise<WatchItem[]> {
    const { version, resource, objects } = await this.reads.apiserver.list(read);
    const reconnected = this.#state.reconnected();
    const resumeVersion = receivedVersion(version, true);
    // The apiserver does not tell the cluster.
    this.#state.movedTo(resumeVersion, "");
    this.#at = new AtVersion();
    this.#hadState = false;
    const type = EventType.ADDED;
    return [
      ...reconnected,
      {
        kind: "snapshotBegin",
        resourceVersion: version,
        restartedFrom: "",
        resource,
        resumeVersion: "",
      },
      ...objects.map((object) => ({ kind: "event" as const, type, object, resumeVersion: "" })),
      { kind: "snapshotEnd", objectCount: objects.length, resumeVersion },
    ];
  }

  async #read(events: AsyncGenerator<ApiserverEvent>): Promise<WatchItem[]> {
    let result: IteratorResult<ApiserverEvent>;
    try {
      result = await events.next();
    } catch (error) {
      return this.#ended(error);
    }
    if (result.done === true) {
      return this.#ended(undefined);
    }
    const found = result.value;
    if ("bookmark" in found) {
      const resumeVersion = receivedVersion(found.bookmark, true);
      this.#state.movedTo(resumeVersion);
      return [{ kind: "bookmark", resumeVersion }];
    }
    const { type, object } = found;
    const { labelSelector = "", fieldSelector = "" } = this.#options;
    // With a selector the object may exist, and have ceased to match.
    const isGone = type === EventType.DELETED && labelSelector === "" && fieldSelector === "";
    const reason = isGone ? { deleteReason: DeleteReason.OBJECT_DELETED } : {};
    const resumeVersion = object.resourceVersion;
    const event: WatchEvent = { kind: "event", type, object, ...reason, resumeVersion };
    if (!this.#at.accepts(event)) {
      return [];
    }
    this.#state.movedTo(resumeVersion);
    return [event];
  }

  #ended(failure: unknown): WatchItem[] {
    this.#events = undefined;
    this.#cancel();
    this.#at.hasMoved = true;
    const now = performance.now();
    if (this.#leaves) {
      this.#refusedUntil = 0;
      return [];
    }
    if (this.#state.isOver(now)) {
      return [];
    }
    if (failure === undefined) {
      // A server that ends each watch at once is not asked in a tight loop.
      if (now - this.#watchOpenedAt < SHORT_STREAM_MS) {
        this.#retryAt = now + this.#state.pauseMs(now);
      }
      return [];
    }
    if (!(failure instanceof KubefanError)) {
      const problem = failure instanceof Error ? failure.message : "an unknown failure";
      throw new KubefanError(problem, { code: "INTERNAL", cause: failure });
    }
    this.#hadState = this.#hasState;
    const { isHealthy, epoch } = this.reads.monitor;
    if (!(failure instanceof Expired) && !failure.isRetryable) {
      if (isHealthy) {
        // Neither has an answer.
        return this.#state.failed(failure, now);
      }
      this.#barredIn = epoch;
    }
    const items = this.#state.failed(failure, now, false, false);
    for (const item of items) {
      if (item.kind === "disconnected" || item.kind === "restarted") {
        this.#retryAt = now + item.retryInMs;
      }
    }
    return items;
  }
}
