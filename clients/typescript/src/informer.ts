// An informer: one loop for the watch, and one for each handler.

import { AsyncLocalStorage } from "node:async_hooks";
import { setImmediate as nextTurn, setTimeout as sleep } from "node:timers/promises";
import type { Connection } from "./connection.js";
import { KubefanError, Stopped } from "./errors.js";
import {
  BACKLOG_CALLS_MAX,
  BacklogQueue,
  callHandler,
  type EventHandler,
  type Waiting,
} from "./handlers.js";
import { InformerState, versionNumber } from "./informer-state.js";
import type { AnyValue } from "./objects.js";
import { checkHandler, checkOptions } from "./option-checks.js";
import type { HandlerOptions, InformerOptions, StopOptions, WaitOptions } from "./options.js";
import type { Indexer } from "./store.js";
import { WatchItems } from "./watch.js";

/** The limit for the calls that are under way at a stop. */
const STOP_MS_MAX = 10_000;

/** A condition that is looked at again whenever something has changed. */
class Changed {
  #waiting = new Set<() => void>();

  notify(): void {
    // Usually no caller waits.
    if (this.#waiting.size === 0) {
      return;
    }
    const waiting = [...this.#waiting];
    this.#waiting.clear();
    for (const wake of waiting) {
      wake();
    }
  }

  /** Waits until the condition is met. False after the timeout. */
  async until(condition: () => boolean, options: WaitOptions): Promise<boolean> {
    const { signal, timeoutMs } = options;
    const end = timeoutMs === undefined ? Infinity : performance.now() + timeoutMs;
    for (;;) {
      signal?.throwIfAborted();
      if (condition()) {
        return true;
      }
      const left = end - performance.now();
      if (left <= 0) {
        return false;
      }
      await new Promise<void>((resolve) => {
        const wake = (): void => {
          clearTimeout(timer);
          signal?.removeEventListener("abort", wake);
          this.#waiting.delete(wake);
          resolve();
        };
        const timer = left === Infinity ? undefined : setTimeout(wake, Math.min(left, 2 ** 31 - 1));
        signal?.addEventListener("abort", wake, { once: true });
        this.#waiting.add(wake);
      });
    }
  }
}

/** A handler of an informer. */
export interface Registration {
  /** The calls that wait. */
  readonly backlog: number;
  /**
   * Waits until the handler has been called for the whole initial list. False after `timeoutMs`.
   */
  waitForSync(options?: WaitOptions): Promise<boolean>;
  /** Ends the handler: it gets no more calls. Waits for the running call. */
  remove(): Promise<void>;
}

/** The handler whose function runs: it must not wait for itself. */
const current = new AsyncLocalStorage<unknown>();

class Handler<T extends object> implements Registration {
  readonly #functions: EventHandler<T>;
  readonly #queue: BacklogQueue<T>;
  readonly #report: (error: unknown) => void;
  readonly #onRemove: (handler: Handler<T>) => void;
  readonly #changed = new Changed();
  #isEnded = false;
  #isSynced = false;
  readonly #ended: Promise<void>;

  constructor(
    functions: EventHandler<T>,
    callsMax: number,
    report: (error: unknown) => void,
    onRemove: (handler: Handler<T>) => void,
  ) {
    this.#functions = functions;
    this.#queue = new BacklogQueue(callsMax);
    this.#report = report;
    this.#onRemove = onRemove;
    this.#ended = this.#run();
  }

  get backlog(): number {
    return this.#queue.size;
  }

  async waitForSync(options: WaitOptions = {}): Promise<boolean> {
    checkOptions("waitForSync", options);
    await this.#changed.until(() => this.#isSynced || this.#isEnded, options);
    return this.#isSynced;
  }

  async remove(): Promise<void> {
    this.#onRemove(this);
    await this.end();
  }

  /** Ends it, and waits for the call that is under way, unless that call waits for this. */
  async end(): Promise<void> {
    this.#isEnded = true;
    this.#changed.notify();
    if (current.getStore() !== this) {
      await this.#ended;
    }
  }

  push(calls: Iterable<Waiting<T>>): void {
    for (const call of calls) {
      this.#queue.push(call);
    }
    this.#changed.notify();
  }

  async #run(): Promise<void> {
    // The first call comes after `addEventHandler` has returned.
    await nextTurn();
    for (let count = 1; ; count++) {
      await this.#changed.until(() => this.#isEnded || this.#queue.size > 0, {});
      // A property, because `until` changes it out of the compiler's sight.
      if (this.#hasEnded()) {
        return;
      }
      const call = this.#queue.pop();
      if (call === undefined) {
        continue;
      }
      if (call.kind === "initialListEnd") {
        this.#isSynced = true;
        this.#changed.notify();
        continue;
      }
      try {
        await current.run(this, () => callHandler(this.#functions, call));
      } catch (error) {
        this.#report(error);
      }
      if (count % 64 === 0) {
        // The rest of the program gets its turn between the calls of a long list.
        await nextTurn();
      }
    }
  }

  #hasEnded(): boolean {
    return this.#isEnded;
  }
}

/**
 * Keeps a store equal to the server's state, and calls handlers for each change.
 *
 * It never ends because of an error: it retries with its backoff. End it with `stop`, or with
 * `await using`.
 */
export class Informer<T extends object = AnyValue> implements AsyncDisposable {
  /** The store. It changes before a handler is called, and is complete after `waitForSync`. */
  readonly indexer: Indexer<T>;
  readonly #connection: Connection;
  readonly #resource: string;
  readonly #state: InformerState<T>;
  readonly #changed = new Changed();
  readonly #handlers = new Set<Handler<T>>();
  readonly #observers: ((error: unknown) => void)[] = [];
  readonly #stopped = new AbortController();
  readonly #signals: AbortSignal[];
  #running: Promise<void> | undefined;

  /** @internal Made by `Client.informer`. */
  constructor(connection: Connection, resource: string, options: InformerOptions) {
    this.#connection = connection;
    this.#resource = resource;
    this.#state = new InformerState<T>(options, (error) => {
      this.#report(error);
    });
    this.indexer = this.#state.store;
    this.#signals = [connection.closed, ...(options.signal === undefined ? [] : [options.signal])];
    for (const signal of this.#signals) {
      signal.addEventListener("abort", this.#onAbort, { once: true });
      if (signal.aborted) {
        this.#stopped.abort();
      }
    }
  }

  /** Everything at or below this version is in the store. Empty before the first state. */
  get resourceVersion(): string {
    return this.#state.resourceVersion;
  }

  /** Whether the first state is complete in the store. */
  get hasSynced(): boolean {
    return this.#state.isSynced;
  }

  /**
   * Adds a handler, before or after the start. It first gets all objects as additions.
   *
   * It gets its calls one at a time, in order; a function that returns a promise is waited for. A
   * slow handler delays no other. Above `backlogMax` waiting calls, changes of one object become
   * one call. A function that throws does not end the handler. Throws `Stopped`, and a
   * `TypeError` if the handler has none of its functions.
   */
  addEventHandler(functions: EventHandler<T>, options: HandlerOptions = {}): Registration {
    this.#refuseStopped();
    checkHandler(functions);
    checkOptions("addEventHandler", options);
    const handler = new Handler<T>(
      functions,
      options.backlogMax ?? BACKLOG_CALLS_MAX,
      (error) => {
        this.#report(error);
      },
      (removed) => {
        this.#handlers.delete(removed);
      },
    );
    if (this.#state.isSynced) {
      const present = this.#state.store
        .list()
        .map((object): Waiting<T> => ({ kind: "add", object, isInInitialList: true }));
      handler.push([...present, { kind: "initialListEnd" }]);
    }
    this.#handlers.add(handler);
    return handler;
  }

  /** Calls `observer` with each error. Without an observer they are process warnings. */
  onError(observer: (error: unknown) => void): this {
    this.#observers.push(observer);
    return this;
  }

  /** Starts the informer. A second start does nothing. Throws `Stopped`. */
  start(): this {
    this.#refuseStopped();
    this.#running ??= this.#run();
    return this;
  }

  /**
   * Waits until the first state is complete in the store. False after `timeoutMs`. Rejects with
   * `Stopped` if the informer is stopped before.
   */
  async waitForSync(options: WaitOptions = {}): Promise<boolean> {
    checkOptions("waitForSync", options);
    return this.#wait(() => this.#state.isSynced, options);
  }

  /**
   * Waits until the store has everything up to this version, such as that of an own write. False
   * after `timeoutMs`. Rejects with `Stopped` if the informer is stopped before.
   */
  async waitUntil(resourceVersion: string, options: WaitOptions = {}): Promise<boolean> {
    checkOptions("waitUntil", options);
    const wanted = versionNumber(resourceVersion);
    if (wanted === undefined) {
      throw new TypeError(`"${resourceVersion}" is not a resource version`);
    }
    return this.#wait(() => (versionNumber(this.resourceVersion) ?? -1n) >= wanted, options);
  }

  /**
   * Ends the watch and, after the calls under way, the handlers. Final. It waits at most
   * `timeoutMs`, 10,000 by default. The store keeps its last state.
   */
  async stop(options: StopOptions = {}): Promise<void> {
    checkOptions("stop", options);
    this.#end();
    const waited = [...this.#handlers].map((handler) => handler.end());
    const limit = new AbortController();
    await Promise.race([
      Promise.all([this.#running, ...waited]),
      sleep(options.timeoutMs ?? STOP_MS_MAX, undefined, { signal: limit.signal }).catch(
        () => undefined,
      ),
    ]);
    limit.abort();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }

  readonly #onAbort = (): void => {
    this.#end();
    for (const handler of this.#handlers) {
      void handler.end();
    }
  };

  #end(): void {
    this.#stopped.abort();
    for (const signal of this.#signals) {
      signal.removeEventListener("abort", this.#onAbort);
    }
    this.#changed.notify();
  }

  #refuseStopped(): void {
    if (this.#stopped.signal.aborted) {
      throw new Stopped("the informer has been stopped");
    }
  }

  async #run(): Promise<void> {
    const stopped = this.#stopped.signal;
    while (!stopped.aborted) {
      const items = new WatchItems<T>(this.#connection, this.#resource, {
        ...this.#state.options(),
        signal: stopped,
      });
      try {
        await this.#follow(items);
      } catch (failure) {
        // Only errors of calls are expected here. Another one is reported, and retried as well.
        const error =
          failure instanceof KubefanError
            ? failure
            : new KubefanError(String(failure), { code: "INTERNAL", cause: failure });
        this.#report(error);
        const delay = this.#state.failed(error, items.resumeVersion, performance.now());
        await sleep(delay, undefined, { signal: stopped }).catch(() => undefined);
      } finally {
        items.close();
      }
    }
  }

  async #follow(items: WatchItems<T>): Promise<void> {
    for await (const item of items) {
      if (item.kind === "disconnected" || item.kind === "restarted") {
        this.#report(item.error);
      }
      const wasSynced = this.#state.isSynced;
      const calls: Waiting<T>[] = this.#state.accept(item, items.cluster);
      if (this.#state.isSynced && !wasSynced) {
        calls.push({ kind: "initialListEnd" });
      }
      if (calls.length > 0) {
        for (const handler of this.#handlers) {
          handler.push(calls);
        }
      }
      if (item.resumeVersion !== "") {
        this.#changed.notify();
      }
    }
  }

  async #wait(condition: () => boolean, options: WaitOptions): Promise<boolean> {
    const stopped = this.#stopped.signal;
    await this.#changed.until(() => condition() || stopped.aborted, options);
    if (condition()) {
      return true;
    }
    this.#refuseStopped();
    return false;
  }

  #report(error: unknown): void {
    if (this.#observers.length === 0) {
      const text = error instanceof Error ? error.message : String(error);
      process.emitWarning(`informer of ${this.#resource}: ${text}`, "KubefanWarning");
    }
    for (const observer of this.#observers) {
      try {
        observer(error);
      } catch (failure) {
        process.emitWarning(`an error observer failed: ${String(failure)}`, "KubefanWarning");
      }
    }
  }
}
