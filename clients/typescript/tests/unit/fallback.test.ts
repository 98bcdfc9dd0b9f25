// When reads go to the apiserver, and how often: with a time of the test's own.

import assert from "node:assert/strict";
import { suite, test } from "node:test";
import {
  Expired,
  Forbidden,
  KubefanError,
  NotCached,
  NotFound,
  ProtocolError,
  Unauthenticated,
  Unavailable,
  Undecodable,
  Unreachable,
} from "../../src/errors.js";
import {
  BUSY_MS_MAX,
  BUSY_PAUSE_MS_MAX,
  BusyRow,
  Gate,
  HOLD_MS_MAX,
  HOLD_MS_MIN,
  Machine,
  Monitor,
  parseBudget,
  verdictOf,
  windowMs,
} from "../../src/fallback.js";
import type { WatchEvent } from "../../src/items.js";
import { KubeObject } from "../../src/objects.js";
import { fieldsOf, itemsOf, namesOf, project, withKind } from "../../src/raw-json.js";
import { AtVersion } from "../../src/watch-fallback.js";
import { FakeClock } from "./fake-clock.js";

/** A machine, and its time. */
class Steps {
  readonly machine = new Machine();
  now = 1_000_000;

  after(ms: number): this {
    this.now += ms;
    return this;
  }

  fails(): this {
    this.machine.failed(this.now, this.machine.epoch);
    return this;
  }

  probe(isHealthy: boolean): string {
    this.machine.probed(this.now, isHealthy);
    return this.machine.side;
  }
}

suite("the states", () => {
  test("one failure moves reads, and one probe returns them if none has moved", () => {
    const steps = new Steps().fails();
    assert.equal(steps.machine.side, "away");
    assert.equal(steps.after(1).probe(false), "away");
    assert.equal(steps.probe(true), "healthy");
  });

  test("reads that moved return after kubefan was healthy for a while", () => {
    const steps = new Steps().fails();
    steps.machine.moved();
    assert.equal(steps.probe(true), "returning");
    assert.equal(steps.after(HOLD_MS_MIN - 1).probe(false), "away");
    assert.equal(steps.probe(true), "returning");
    assert.equal(steps.after(HOLD_MS_MIN - 1).probe(true), "returning");
    assert.equal(steps.after(1).probe(true), "healthy");
  });

  test("a kubefan that fails soon after each return is held longer", () => {
    const steps = new Steps().fails();
    assert.equal(steps.probe(true), "healthy");
    for (const hold of [1, 2, 4, 8, 16, 20, 20].map((times) => times * HOLD_MS_MIN)) {
      assert.equal(steps.after(1).fails().probe(true), "returning");
      assert.equal(steps.after(hold - 1).probe(true), "returning");
      assert.equal(steps.after(1).probe(true), "healthy");
    }
    assert.equal(
      steps
        .after(2 * HOLD_MS_MAX)
        .fails()
        .probe(true),
      "healthy",
    );
  });

  test("only a row of busy answers lasts", () => {
    const rows: [number[], boolean][] = [
      [[0], false],
      [[0, BUSY_MS_MAX - 1], false],
      [[0, BUSY_MS_MAX - 1, BUSY_MS_MAX], true],
      [[0, BUSY_PAUSE_MS_MAX], true],
      [[0, BUSY_PAUSE_MS_MAX + 1], false],
      [[0, BUSY_MS_MAX, BUSY_MS_MAX + BUSY_PAUSE_MS_MAX + 1], false],
    ];
    for (const [times, expected] of rows) {
      const row = new BusyRow();
      assert.equal(times.map((at) => row.lasts(1_000_000 + at)).at(-1), expected, String(times));
    }
  });

  test("an old failure begins no outage", () => {
    const steps = new Steps();
    const old = steps.machine.epoch;
    assert.equal(steps.fails().probe(true), "healthy");
    steps.machine.failed(steps.now, old);
    assert.equal(steps.machine.side, "healthy");
  });

  test("a kubefan that is away is probed until it returns, and then watches leave", async () => {
    const clock = new FakeClock();
    const sides: string[] = [];
    let probes = 0;
    let isServing = false;
    let left = 0;
    const monitor = new Monitor({
      clock,
      probe: () => {
        probes++;
        return Promise.resolve(isServing);
      },
      onSide: (side) => sides.push(side),
      random: () => 0.5,
    });
    await clock.advance(3_600_000);
    assert.equal(probes, 0);
    monitor.note("gone", (machine, now) => {
      machine.failed(now, 0);
      machine.moved();
    });
    monitor.awaitReturn(() => {
      left++;
    });
    await clock.advance(20_000);
    assert.deepEqual([probes, left], [4, 0]);
    isServing = true;
    await clock.advance(35_000);
    assert.deepEqual(sides, ["away", "returning", "healthy"]);
    await clock.advance(3_600_000);
    assert.deepEqual([left, clock.pending.size], [1, 0]);
  });
});

suite("the pace", () => {
  async function order(phase: number, starts: [string, boolean][], ms: number): Promise<string[]> {
    const clock = new FakeClock();
    const gate = new Gate(clock, { clients: 10, rate: 10 }, () => phase);
    const begin = clock.now();
    const words: string[] = [];
    for (const [name, hasState] of starts) {
      gate.enter(hasState, () => words.push(`${name} ${String(clock.now() - begin)}`));
    }
    await clock.advance(ms);
    return words;
  }

  test("those without a state go first, and all are spaced", async () => {
    const starts: [string, boolean][] = [
      ["later 1", true],
      ["first 1", false],
      ["later 2", true],
      ["first 2", false],
    ];
    const expected = ["first 1 500", "first 2 1500", "later 1 2500", "later 2 3500"];
    assert.deepEqual(await order(0.5, starts, 10_000), expected);
    assert.deepEqual(await order(0.25, [["later", true]], 3_000), ["later 1250"]);
  });

  test("those with a state take turns after two windows", async () => {
    const starts = [1, 2, 3, 4, 5].map((at): [string, boolean] => [`first ${String(at)}`, false]);
    starts.push(["later 1", true], ["later 2", true]);
    const seen = (await order(0.5, starts, 10_000)).map((word) => word.slice(0, 7));
    const turns = ["later 1", "first 3", "later 2", "first 4", "first 5"];
    assert.deepEqual(seen, ["first 1", "first 2", ...turns]);
  });

  test("a start that left is not admitted", () => {
    const clock = new FakeClock();
    const gate = new Gate(clock, {}, () => 0.5);
    gate.enter(false, () => assert.fail("it has left"))();
    assert.equal(clock.pending.size, 0);
  });

  test("a kubefan that has just started does not shrink the fleet", async () => {
    const clock = new FakeClock();
    const gate = new Gate(clock, { clients: 1, rate: 1 }, () => 0.5);
    gate.setBudget({ clients: 3_000, rate: 50 });
    await clock.advance(3_600_000);
    gate.setBudget({ clients: 7, rate: 50 });
    const starts: number[] = [];
    let begin = clock.now();
    gate.enter(false, () => starts.push(clock.now() - begin));
    await clock.advance(30_000);
    assert.deepEqual(starts, [30_000], "half a window of 3,000 clients");
    await clock.advance(570_000);
    gate.setBudget({ clients: 7, rate: 50 });
    begin = clock.now();
    gate.enter(false, () => starts.push(clock.now() - begin));
    await clock.advance(1_000);
    assert.deepEqual(starts, [30_000, 70], "only smaller ones were told for ten minutes");
  });

  test("a fleet stays within the rate", async () => {
    const clock = new FakeClock();
    const counts = new Array<number>(81).fill(0);
    let seed = 1;
    const random = (): number => {
      seed = (seed * 16_807) % 2_147_483_647;
      return seed / 2_147_483_647;
    };
    for (let client = 0; client < 2_000; client++) {
      const hasState = client % 2 === 0;
      new Gate(clock, { clients: 2_000, rate: 50 }, random).enter(hasState, () => {
        const second = Math.floor((clock.now() - 1_000_000) / 1_000);
        assert.equal(hasState, second >= 40);
        counts[second] = (counts[second] ?? 0) + 1;
      });
    }
    await clock.advance(81_000);
    // A thousand starts in each window of 40 s are 25 in a second on average.
    assert.equal(
      counts.reduce((sum, count) => sum + count),
      2_000,
    );
    assert(Math.max(...counts) <= 50);
  });

  test("a budget is read as a whole or not at all", () => {
    const windows: Record<string, number | undefined> = {
      "clients=3000, rate=50": 60_000,
      "rate=0.5,clients=10;x=1, new=1": 20_000,
      "clients=1000000, rate=0.001": 600_000,
      "clients=0, rate=50": undefined,
      "clients=3000": undefined,
      "clients=3000, rate=1e9": undefined,
      "clients=3000, rate=-1": undefined,
      "": undefined,
    };
    for (const [text, window] of Object.entries(windows)) {
      const budget = parseBudget(text);
      assert.equal(budget === undefined ? undefined : windowMs(budget), window, text);
    }
    assert.equal(windowMs({}), 10_000);
  });
});

test("only some errors are about kubefan", () => {
  const verdicts: [KubefanError | undefined, string][] = [
    [undefined, "answered"],
    [new Unreachable("", { code: "UNAVAILABLE" }), "away"],
    [new KubefanError("", { code: "INTERNAL" }), "away"],
    [new Unavailable("", { code: "UNAVAILABLE", retryAfterMs: 1 }), "busy"],
    [new Unavailable("", { code: "UNAVAILABLE", reason: "NOT_SYNCED" }), "busy"],
    [new Forbidden("", { code: "PERMISSION_DENIED", reason: "UPSTREAM_FORBIDDEN" }), "refused"],
    [new NotCached("", { code: "FAILED_PRECONDITION", reason: "NOT_CACHED" }), "refused"],
    [new Unavailable("", { code: "UNAVAILABLE", reason: "PASSTHROUGH" }), "refused"],
    [new Expired("", { code: "OUT_OF_RANGE", reason: "RESOURCE_VERSION_TOO_OLD" }), "answered"],
    [new Forbidden("", { code: "PERMISSION_DENIED", reason: "FORBIDDEN" }), "answered"],
    [new Unauthenticated("", { code: "UNAUTHENTICATED" }), "answered"],
    [new NotFound("", { code: "NOT_FOUND", reason: "RESOURCE_NOT_FOUND" }), "answered"],
    [new Unavailable("", { code: "UNAVAILABLE", reason: "DRAINING", retryAfterMs: 1 }), "answered"],
    [new Undecodable(""), "answered"],
    [new ProtocolError(""), "answered"],
  ];
  for (const [error, verdict] of verdicts) {
    assert.equal(verdictOf(error), verdict, error?.reason);
  }
});

test("a version is mapped to the apiserver", () => {
  const at = new AtVersion();
  const seen = ["x", "y"].map(
    (name): WatchEvent => ({
      kind: "event",
      type: "ADDED",
      object: new KubeObject("n", name, "", "12", new Uint8Array()),
      resumeVersion: "12",
    }),
  );
  assert.deepEqual(
    seen.map((event) => at.accepts(event)),
    [true, true],
  );
  at.hasMoved = true;
  assert.deepEqual(
    seen.map((event) => at.accepts(event)),
    [false, false],
  );
  const known = { "12.end": "12", "12": "11", "12.1": "11" };
  // A place in a version proves that there is more of it.
  const versions = { ...known, "9": "9", "9.1": "8", "9.end": "9", "": "" };
  for (const [text, version] of Object.entries(versions)) {
    assert.equal(at.from(text), version, text);
  }
});

suite("the parts of a JSON text", () => {
  const pod =
    '{"kind":"Pod","metadata":{"name":"web","resourceVersion":"7","labels":{"app":"web"},' +
    '"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{\\"x\\":1}",' +
    '"example.com/on":"\\u003cyes"},"managedFields":[{"manager":"m"}]},' +
    '"spec":{"nodeName":"n1","containers":[{"name":"a","image":"i:1"},{"name":"b"}],' +
    '"volumes":[],"long":12345678901234567890},"status":{"phase":"Running"}}';

  test("are as they were in it", () => {
    const items = ['{"a":[1]}', '"x]"', "2.0", "[]"];
    assert.deepEqual(itemsOf(' [ {"a":[1]} , "x]" , 2.0,[] ] '), items);
    assert.deepEqual(
      fieldsOf('{ "2" : 1 , "1":"\\"}"}')?.map(({ name, value }) => [name, value]),
      [
        ["2", "1"],
        ["1", '"\\"}"'],
      ],
    );
    assert.deepEqual([itemsOf("{}"), fieldsOf("[]"), fieldsOf("{}")], [undefined, undefined, []]);
    assert.equal(withKind('{"a":1}', "Pod", "v1"), '{"kind":"Pod","apiVersion":"v1","a":1}');
    assert.equal(withKind('{"kind":"X"}', "Pod", "v1"), '{"kind":"X"}');
  });

  test("a projection leaves out what kubefan would", () => {
    const fields = (...paths: string[]): string => project(pod, { paths });
    assert.equal(
      fields("status.phase", "spec.containers.image", "metadata.labels", "spec.long"),
      '{"metadata":{"labels":{"app":"web"}},"spec":{"containers":[{"image":"i:1"},{}],' +
        '"long":12345678901234567890},"status":{"phase":"Running"}}',
    );
    assert.equal(
      fields("metadata.annotations.example\\.com/on"),
      '{"metadata":{"annotations":{"example.com/on":"\\u003cyes"}}}',
    );
    assert.equal(fields("metadata.annotations.example", "spec.volumes.name", "kind.x"), "{}");
    const canonical = project(pod, { dropLastApplied: true });
    assert(!/resourceVersion|managedFields|last-applied/.test(canonical), canonical);
    const name = "kubectl.kubernetes.io/last-applied-configuration";
    const only = JSON.stringify({ metadata: { annotations: { [name]: "x" } } });
    assert.equal(project(only, { dropLastApplied: true }), '{"metadata":{}}');
    assert.throws(() => namesOf("a..b"), TypeError);
  });
});
