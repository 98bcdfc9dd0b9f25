// A running watch: it opens the calls that the state machine asks for, and waits between them.

import { setImmediate as nextTurn, setTimeout as sleep } from "node:timers/promises";
import { Changes } from "./changes.js";
import {
  ANSWER_MS_MAX,
  headersOf,
  noAnswer,
  outsideOfHttp2,
  type Connection,
} from "./connection.js";
import { Unauthenticated, errorOf, type KubefanError } from "./errors.js";
import type { WatchResponse } from "./gen/kubefan/v1alpha1/watch_pb.js";
import type { WatchEvent, WatchItem } from "./items.js";
import type { AnyValue } from "./objects.js";
import { Fallback, type WatchOptions } from "./options.js";
import { ErrorReason } from "./reasons.js";
import { WatchFallback } from "./watch-fallback.js";
import { WatchState } from "./watch-state.js";

/** One call of a watch. */
interface Call {
  readonly responses: AsyncIterator<WatchResponse>;
  readonly abort: AbortController;
  readonly sent: string | undefined;
  /** The first response, which is asked for to open the call. */
  first: Promise<IteratorResult<WatchResponse>> | undefined;
  /** The call was ended, because it had no answer in time. */
  isLate: boolean;
}

/** The common part of both kinds of watches: one reader, `close`, and the way into `for await`. */
abstract class Reader<T> implements AsyncIterableIterator<T>, AsyncDisposable {
  #queue: Promise<unknown> = Promise.resolve();

  /** Waits for the next one. Rejects with an error that a retry cannot resolve. */
  next(): Promise<IteratorResult<T, undefined>> {
    // One at a time, also if the caller does not wait for the one before.
    const result = this.#queue.then(() => this.advance());
    this.#queue = result.catch(() => undefined);
    return result;
  }

  /** Ends the watch: called when a `for await` is left. */
  return(): Promise<IteratorResult<T, undefined>> {
    this.close();
    return Promise.resolve({ done: true, value: undefined });
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  [Symbol.asyncDispose](): Promise<void> {
    this.close();
    return Promise.resolve();
  }

  /** Ends the watch, also while another function waits for `next`. */
  abstract close(): void;

  protected abstract advance(): Promise<IteratorResult<T, undefined>>;
}

/**
 * A running watch with everything that the server and the connection report. One function reads it.
 *
 * It ends after its timeout, after `close`, and when its signal is aborted. It rejects with an
 * error that a retry cannot fix, such as `Forbidden`; then it has ended, too.
 */
export class WatchItems<T extends object = AnyValue> extends Reader<WatchItem<T>> {
  readonly #connection: Connection;
  readonly #state: WatchState;
  readonly #signals: AbortSignal[];
  readonly #closed = new AbortController();
  readonly #onAbort = (): void => {
    this.close();
  };
  #ready: WatchItem[] = [];
  #at = 0;
  readonly #fallback: WatchFallback | undefined;
  #call: Call | undefined;
  #resumeVersion: string;

  /** @internal Made by `Client.watchItems`. */
  constructor(connection: Connection, resource: string, options: WatchOptions) {
    super();
    this.#connection = connection;
    this.#state = new WatchState(resource, options, { address: connection.address });
    const reads = options.fallback === Fallback.NEVER ? undefined : connection.fallback;
    if (reads !== undefined) {
      const closed = this.#closed.signal;
      this.#fallback = new WatchFallback(reads, this.#state, resource, options, closed);
    }
    this.#resumeVersion = options.resourceVersion ?? "";
    this.#signals = [connection.closed, ...(options.signal === undefined ? [] : [options.signal])];
    for (const signal of this.#signals) {
      signal.addEventListener("abort", this.#onAbort, { once: true });
      if (signal.aborted) {
        this.close();
      }
    }
  }

  /**
   * Every item at or below this version has been returned. Empty until the first snapshot is
   * complete.
   */
  get resumeVersion(): string {
    return this.#resumeVersion;
  }

  /** The cluster of `resumeVersion`, for `watch({ cluster })`; empty if it is unknown. */
  get cluster(): string {
    return this.#state.cluster;
  }

  override close(): void {
    this.#closed.abort();
    for (const signal of this.#signals) {
      signal.removeEventListener("abort", this.#onAbort);
    }
    this.#cancel();
  }

  protected override async advance(): Promise<IteratorResult<WatchItem<T>, undefined>> {
    for (;;) {
      if (this.#closed.signal.aborted) {
        return { done: true, value: undefined };
      }
      const item = this.#ready[this.#at];
      if (item !== undefined) {
        this.#at++;
        this.#resumeVersion = item.resumeVersion === "" ? this.#resumeVersion : item.resumeVersion;
        // The server decides on the fields of objects; `T` is the caller's own claim.
        return { done: false, value: item as WatchItem<T> };
      }
      if (this.#state.ended) {
        this.close();
        return { done: true, value: undefined };
      }
      this.#at = 0;
      this.#ready = [];
      this.#ready = await this.#step();
    }
  }

  async #step(): Promise<WatchItem[]> {
    const call = this.#call;
    if (call === undefined) {
      const fallback = this.#fallback;
      return fallback?.isDirect(performance.now()) === true ? fallback.step() : this.#open();
    }
    let result: IteratorResult<WatchResponse>;
    try {
      const first = call.first;
      call.first = undefined;
      result = await (first ?? call.responses.next());
    } catch (failure) {
      await outsideOfHttp2();
      const error = call.isLate ? noAnswer(this.#connection.address) : failure;
      return this.#failed(errorOf(error, this.#connection.address), call.sent);
    }
    if (this.#closed.signal.aborted) {
      return [];
    }
    if (result.done === true) {
      this.#call = undefined;
      return this.#state.finished(performance.now());
    }
    const items = this.#state.accept(result.value, performance.now());
    if (items.at(-1)?.kind === "disconnected") {
      this.#cancel();
    }
    return this.#fallback?.filtered(items) ?? items;
  }

  async #open(): Promise<WatchItem[]> {
    const delay = this.#state.delay(performance.now());
    if (delay > 0) {
      await sleep(delay, undefined, { signal: this.#closed.signal }).catch(() => undefined);
      if (this.#closed.signal.aborted) {
        return [];
      }
    }
    const now = performance.now();
    // Another read may have found meanwhile that kubefan is away.
    if (this.#fallback?.isDirect(now) === true) {
      return [];
    }
    const request = this.#state.request(now);
    if (request === undefined) {
      return [];
    }
    this.#fallback?.asks();
    let sent: string | undefined;
    try {
      sent = this.#connection.authorization();
    } catch (failure) {
      return this.#failed(errorOf(failure, this.#connection.address), undefined);
    }
    const reads = this.#connection.fallback;
    const abort = new AbortController();
    let answer = (): void => undefined;
    const answered = new Promise<void>((resolve) => {
      answer = resolve;
    });
    const responses = this.#connection.rpc.watch(request, {
      headers: headersOf(sent),
      signal: abort.signal,
      timeoutMs: this.#state.callMs(now),
      onHeader: (headers) => {
        reads?.learn(headers);
        answer();
      },
    })[Symbol.asyncIterator]();
    const first = responses.next();
    const call: Call = { responses, abort, sent, first, isLate: false };
    this.#call = call;
    const limit = setTimeout(() => {
      if (reads !== undefined) {
        call.isLate = true;
        abort.abort();
      }
    }, ANSWER_MS_MAX);
    const isRefused = first.then(
      () => false,
      () => true,
    );
    await Promise.race([answered, isRefused]);
    clearTimeout(limit);
    // A refusal may come right behind the headers. It was never open, and its error comes with the
    // next step.
    if (await Promise.race([isRefused, nextTurn(false)])) {
      return [];
    }
    if (this.#closed.signal.aborted) {
      return [];
    }
    this.#fallback?.opened(performance.now());
    return this.#state.opened(performance.now());
  }

  async #failed(error: KubefanError, sent: string | undefined): Promise<WatchItem[]> {
    this.#call = undefined;
    if (this.#closed.signal.aborted) {
      return [];
    }
    const token = this.#connection.token;
    if (error instanceof Unauthenticated) {
      if (!this.#state.isOpen && token.replacement(sent)) {
        return [];
      }
      token.expire(sent);
    } else if (error.reason === ErrorReason.REAUTHENTICATE) {
      token.expire(sent);
    }
    const now = performance.now();
    const isRefused = (await this.#fallback?.failed(error, now)) === true;
    try {
      return this.#state.failed(error, now, token.mayChange, !isRefused);
    } catch (final) {
      this.close();
      throw final;
    }
  }

  #cancel(): void {
    const call = this.#call;
    this.#call = undefined;
    if (call === undefined) {
      return;
    }
    call.abort.abort();
    void drain(call);
  }
}

/**
 * Reads what is left of a call that was cancelled: a few responses, then its rejection. Only when
 * the library hands that out, it clears the timer of the call's limit, which keeps the process.
 */
async function drain(call: Call): Promise<void> {
  try {
    await call.first;
    for (;;) {
      const { done } = await call.responses.next();
      if (done === true) {
        return;
      }
    }
  } catch {
    // It was cancelled.
  }
}

/**
 * The events of a watch. One function reads it.
 *
 * It ends after its timeout, after `close`, and when its signal is aborted. It rejects with an
 * error that a retry cannot fix, such as `Forbidden`; then it has ended, too.
 */
export class WatchStream<T extends object = AnyValue> extends Reader<WatchEvent<T>> {
  readonly #items: WatchItems<T>;
  readonly #changes = new Changes();
  #ready: WatchEvent[] = [];
  #at = 0;
  #resumeVersion: string;

  /** @internal Made by `Client.watch`. */
  constructor(items: WatchItems<T>) {
    super();
    this.#items = items;
    this.#resumeVersion = items.resumeVersion;
  }

  /** Every event at or below this version has been returned. */
  get resumeVersion(): string {
    return this.#resumeVersion;
  }

  /** The cluster of `resumeVersion`, for `watch({ cluster })`; empty if it is unknown. */
  get cluster(): string {
    return this.#items.cluster;
  }

  override close(): void {
    this.#items.close();
    this.#ready = [];
  }

  protected override async advance(): Promise<IteratorResult<WatchEvent<T>, undefined>> {
    for (;;) {
      const event = this.#ready[this.#at];
      if (event !== undefined) {
        this.#at++;
        this.#note(event.resumeVersion);
        return { done: false, value: event as WatchEvent<T> };
      }
      const item = await this.#items.next();
      if (item.done === true) {
        return item;
      }
      this.#at = 0;
      this.#ready = this.#changes.accept(item.value);
      if (this.#ready.length === 0) {
        this.#note(item.value.resumeVersion);
      }
    }
  }

  #note(version: string): void {
    this.#resumeVersion = version === "" ? this.#resumeVersion : version;
  }
}
