// Tests of reads at an apiserver while time passes, with a clock of their own.

import assert from "node:assert/strict";
import { suite, test } from "node:test";
import { Unavailable, Unreachable } from "../../src/errors.js";
import { BUSY_MS_MAX } from "../../src/fallback.js";
import { FallbackReads } from "../../src/fallback-reads.js";
import { WatchFallback } from "../../src/watch-fallback.js";
import { WatchState } from "../../src/watch-state.js";
import { FakeApiserver, type Answer } from "./apiserver.js";
import { FakeClock } from "./fake-clock.js";
import { until } from "./recorder.js";

const GONE = new Unreachable("gone", { code: "UNAVAILABLE" });
const BUSY = new Unavailable("not synced", { code: "UNAVAILABLE", reason: "NOT_SYNCED" });

/** A watch from version 5 whose client finds no kubefan. */
class Scene implements AsyncDisposable {
  isServing = false;
  readonly clock = new FakeClock();
  readonly sides: string[] = [];
  readonly reads: FallbackReads;
  readonly state: WatchState;
  readonly watch: WatchFallback;
  readonly #closed = new AbortController();

  private constructor(readonly apiserver: FakeApiserver) {
    this.reads = new FallbackReads({
      address: "kubefan",
      apiserver: apiserver.client,
      budget: { clients: 1, rate: 1_000 },
      clock: this.clock,
      probe: () => Promise.resolve(this.isServing),
      onSide: (side) => {
        this.sides.push(side);
        throw new Error("a mistake of the program, which ends no read");
      },
    });
    const options = { resourceVersion: "5", backoff: { initialMs: 1_000, maxMs: 1_000 } };
    this.state = new WatchState("pods", options, { address: "kubefan" });
    const closed = this.#closed.signal;
    this.watch = new WatchFallback(this.reads, this.state, "pods", options, closed);
  }

  static async start(...watches: Answer[]): Promise<Scene> {
    return new Scene(await FakeApiserver.start([], watches));
  }

  /** The client finds no kubefan, and the watch asks the apiserver. */
  async asks(): Promise<ReturnType<WatchFallback["step"]>[]> {
    this.reads.note(GONE, 0, "watch");
    this.state.failed(GONE, performance.now());
    const step = this.watch.step();
    // It has nothing to wait for, and then waits for its start.
    await this.clock.advance(0);
    await this.clock.advance(10);
    await until("a request", () => this.apiserver.requests.length === 1);
    return [step];
  }

  /** kubefan is there again. */
  async returns(): Promise<void> {
    this.isServing = true;
    await this.clock.advance(120_000);
    assert.equal(this.sides.at(-1), "healthy");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#closed.abort();
    this.reads.close();
    await this.apiserver[Symbol.asyncDispose]();
  }
}

suite("a watch at the apiserver", () => {
  test("leaves one that hangs when kubefan returns", async () => {
    await using scene = await Scene.start("hang");
    const [step] = await scene.asks();
    await scene.returns();
    assert.deepEqual(await step, []);
    assert.equal(scene.watch.isDirect(performance.now()), false);
  });

  test("ends the wait after an error of the apiserver when kubefan returns", async () => {
    await using scene = await Scene.start("later");
    const [step] = await scene.asks();
    const [item] = (await step) ?? [];
    assert(item?.kind === "disconnected");
    // The delay that the apiserver asks for has a bound.
    assert.equal(item.retryInMs, 60_000);
    const next = scene.watch.step();
    scene.isServing = true;
    await scene.clock.advance(50_000);
    assert.deepEqual([await next, scene.apiserver.requests], [[], ["watch 5"]]);
    assert(scene.state.delay(performance.now()) <= 2_000);
  });

  test("that ends at once is not repeated at once", async () => {
    await using scene = await Scene.start("end");
    const [step] = await scene.asks();
    assert.deepEqual((await step)?.map(({ kind }) => kind), ["reconnected"]);
    assert.deepEqual(await scene.watch.step(), []);
    void scene.watch.step();
    const waits = (): boolean => [...scene.clock.pending].some(({ at }) => at > scene.clock.now());
    assert(waits());
    assert.deepEqual(scene.apiserver.requests, ["watch 5"]);
  });
});

suite("a kubefan that is busy for long", () => {
  for (const isServing of [true, false]) {
    const what = isServing ? "serves: only this read moves" : "does not serve: it is away";
    test(what, async () => {
      await using scene = await Scene.start();
      scene.isServing = isServing;
      assert.equal(scene.reads.note(BUSY, 0, "watch pods"), "busy");
      await scene.clock.advance(BUSY_MS_MAX);
      assert.equal(scene.reads.note(BUSY, 0, "list pods"), "busy");
      assert.equal(scene.reads.note(BUSY, 0, "watch pods"), "busyForLong");
      assert.equal(await scene.reads.judge(BUSY, 0), isServing ? "refused" : "away");
      assert.deepEqual(scene.sides, isServing ? [] : ["away"]);
    });
  }
});
