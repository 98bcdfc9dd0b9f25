// Helpers for tests of running watches.

import assert from "node:assert/strict";
import type { WatchEvent, WatchItem } from "../../src/items.js";

/** The limit of each wait. It is only reached by a test that fails. */
export const WAIT_MS_MAX = 30_000;

/** Delays that do not slow the tests. */
export const FAST = { initialMs: 1, maxMs: 1 };

/** Waits until a condition is true. */
export async function until(
  what: string,
  condition: () => boolean,
  limitMs = WAIT_MS_MAX,
): Promise<void> {
  const end = performance.now() + limitMs;
  while (!condition()) {
    assert(performance.now() < end, `waited for ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 2));
  }
}

/** Reads a watch, and keeps its items. */
export class Recorder<T extends WatchEvent | WatchItem> {
  readonly seen: T[] = [];
  error: unknown;
  ended = false;

  constructor(readonly watch: AsyncIterableIterator<T>) {
    void this.#run();
  }

  async until(what: string, ...expected: string[]): Promise<void> {
    const wanted = expected.join();
    await until(`${what}; got ${this.names().join()}`, () => this.names().join() === wanted);
  }

  async untilEnded(): Promise<void> {
    await until("the end of the watch", () => this.ended);
  }

  /** The events. */
  names(): string[] {
    return this.seen.flatMap((one: WatchItem) =>
      one.kind === "event" ? [`${one.type} ${one.object.name}`] : [],
    );
  }

  /** The other items. */
  kinds(): string[] {
    return this.seen.map((one) => one.kind).filter((kind) => kind !== "event");
  }

  async #run(): Promise<void> {
    try {
      for await (const one of this.watch) {
        this.seen.push(one);
      }
    } catch (error) {
      this.error = error;
    }
    this.ended = true;
  }
}
