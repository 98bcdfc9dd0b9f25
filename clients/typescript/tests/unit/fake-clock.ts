// A clock of a test.

import type { Clock } from "../../src/fallback.js";

/** A time that moves only by `advance`. */
export class FakeClock implements Clock {
  #now = 1_000_000;
  readonly pending = new Set<{ at: number; run: () => void }>();

  now(): number {
    return this.#now;
  }

  callLater(ms: number, run: () => void): () => void {
    const timer = { at: this.#now + ms, run };
    this.pending.add(timer);
    return () => this.pending.delete(timer);
  }

  /** Runs what is due, in the order of time, also what that sets. */
  async advance(ms: number): Promise<void> {
    const end = this.#now + ms;
    for (;;) {
      const due = [...this.pending]
        .filter(({ at }) => at <= end)
        .sort((one, other) => one.at - other.at)[0];
      if (due === undefined) {
        this.#now = end;
        return;
      }
      this.pending.delete(due);
      this.#now = Math.max(this.#now, due.at);
      due.run();
      // A probe is a promise.
      await new Promise((resolve) => setImmediate(resolve));
    }
  }
}
