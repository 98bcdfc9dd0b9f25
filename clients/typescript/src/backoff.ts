// The delay before a retry. Time and random numbers are arguments, so tests control both.

import type { BackoffOptions } from "./options.js";

/** The state of one retry loop. Times are in milliseconds. */
export class Backoff {
  readonly #options: Required<BackoffOptions>;
  readonly #random: () => number;
  #next: number;
  #healthySince: number | undefined;

  constructor(options: BackoffOptions = {}, random: () => number = Math.random) {
    this.#options = {
      initialMs: options.initialMs ?? 800,
      maxMs: options.maxMs ?? 30_000,
      factor: options.factor ?? 2,
      jitter: options.jitter ?? 1,
      resetAfterMs: options.resetAfterMs ?? 120_000,
    };
    this.#random = random;
    this.#next = this.#options.initialMs;
  }

  /**
   * The delay after a failure at `now`; never shorter than `retryAfterMs`.
   *
   * The time since the end of the previous delay counts as healthy. After `resetAfterMs` of it the
   * first delay applies again.
   */
  nextDelay(now: number, retryAfterMs = 0): number {
    const options = this.#options;
    if (this.#healthySince === undefined || now - this.#healthySince >= options.resetAfterMs) {
      this.#next = options.initialMs;
    }
    const base = this.#next;
    this.#next = Math.min(base * options.factor, options.maxMs);
    const delay = Math.max(base * (1 + options.jitter * this.#random()), retryAfterMs);
    this.#healthySince = now + delay;
    return delay;
  }
}
