// The state machine of an informer, with recorded sequences of messages, and its waiting calls.

import assert from "node:assert/strict";
import { suite, test } from "node:test";
import { Expired, Forbidden, Unreachable } from "../../src/errors.js";
import type * as api from "../../src/gen/kubefan/v1alpha1/watch_pb.js";
import { BacklogQueue, type Notification, type Waiting } from "../../src/handlers.js";
import { InformerState, OLD_SNAPSHOTS_MAX } from "../../src/informer-state.js";
import { KubeObject } from "../../src/objects.js";
import { Projection, type InformerOptions } from "../../src/options.js";
import { WatchState } from "../../src/watch-state.js";
import { begin, catchUpBegin, catchUpEnd, end, event, gapBegin, gapEnd } from "./messages.js";

const first = [begin("5"), event("ADDED", "a", "1"), event("ADDED", "b", "2"), end("5", 2)];

function shown(call: Notification): string {
  switch (call.kind) {
    case "add":
      return `add ${call.object.name}${call.isInInitialList ? " initial" : ""}`;
    case "update":
      return (
        `update ${call.object.name} ` +
        `${call.old.resourceVersion}→${call.object.resourceVersion}`
      );
    case "delete":
      return `delete ${call.object.name}${call.finalStateUnknown ? " unknown" : ""}`;
  }
}

/** An informer's state, fed by messages. */
class Rig {
  readonly state: InformerState;
  #machine: WatchState;

  constructor(options: InformerOptions = {}) {
    this.state = new InformerState(options);
    this.#machine = this.connect();
  }

  connect(): WatchState {
    this.#machine = new WatchState("pods", this.state.options(), { random: () => 0 });
    this.#machine.request(0);
    this.#machine.opened(0);
    return this.#machine;
  }

  read(...messages: api.WatchResponse[]): string[] {
    return messages
      .flatMap((message) => this.#machine.accept(message, 0))
      .flatMap((item) => this.state.accept(item, this.#machine.cluster))
      .map(shown);
  }

  break(): void {
    for (const item of this.#machine.failed(new Unreachable("gone"), 0)) {
      this.state.accept(item, this.#machine.cluster);
    }
  }

  stored(): string[] {
    return this.state.store.list().map((made) => `${made.name} ${made.resourceVersion}`);
  }
}

suite("an informer", () => {
  test("counts the first state when it is complete", () => {
    const rig = new Rig();
    assert.deepEqual(rig.read(...first.slice(0, 3)), []);
    const { isSynced, resourceVersion: version } = rig.state;
    assert.deepEqual([isSynced, rig.stored(), version], [false, [], ""]);
    assert.deepEqual(rig.read(...first.slice(3)), ["add a initial", "add b initial"]);
    assert.deepEqual([rig.state.isSynced, rig.stored()], [true, ["a 1", "b 2"]]);
    const { resourceVersion, cluster } = rig.state.options();
    assert.deepEqual([resourceVersion, cluster], ["5", "c1"]);
  });

  test("changes its store and calls handlers for each event", () => {
    const rig = new Rig();
    rig.read(...first);
    assert.deepEqual(
      rig.read(
        event("MODIFIED", "a", "6", "6"),
        event("ADDED", "c", "7", "7"),
        event("DELETED", "b", "8", "8"),
      ),
      ["update a 1→6", "add c", "delete b"],
    );
    assert.deepEqual([rig.stored(), rig.state.resourceVersion], [["a 6", "c 7"], "8"]);
  });

  test("has real deletions after a relist, with the last known object", () => {
    const rig = new Rig();
    rig.read(...first);
    assert.deepEqual(
      rig.read(begin("20", "5"), event("ADDED", "b", "9"), event("ADDED", "c", "8"), end("20")),
      ["delete a unknown", "update b 2→9", "add c"],
    );
    assert.deepEqual(rig.stored(), ["b 9", "c 8"]);
  });

  test("applies a unit at its end or not at all", () => {
    const rig = new Rig();
    rig.read(...first);
    assert.deepEqual(rig.read(gapBegin("5"), event("ADDED", "ghost", "6")), []);
    rig.break();
    assert.deepEqual(rig.stored(), ["a 1", "b 2"]);
    assert.deepEqual(
      rig.read(
        catchUpBegin("5"),
        event("DELETED", "a", "1", "", { unknown: true }),
        event("ADDED", "a", "8", "", { uid: "new" }),
        event("DELETED", "never-known", "3", "", { unknown: true }),
        catchUpEnd("9"),
      ),
      ["delete a unknown", "add a"],
    );
    assert.deepEqual(rig.stored().sort(), ["a 8", "b 2"]);
    assert.deepEqual(rig.read(gapBegin("9"), gapEnd("12")), []);
    assert.equal(rig.state.resourceVersion, "12");
  });

  test("ignores a snapshot that breaks off", () => {
    const rig = new Rig();
    rig.read(...first);
    assert.deepEqual(rig.read(begin("20", "5"), event("ADDED", "z", "19")), []);
    rig.break();
    assert.deepEqual(rig.stored(), ["a 1", "b 2"]);
  });

  test("keeps an unchanged object, and calls nothing", () => {
    const rig = new Rig();
    rig.read(...first);
    const before = rig.state.store.get("default/a");
    const again = [begin("20"), event("ADDED", "a", "1"), event("ADDED", "b", "2"), end("20")];
    assert.deepEqual(rig.read(...again), []);
    assert.equal(rig.state.store.get("default/a"), before);
  });

  test("starts anew after an error that a retry cannot resolve, and resumes after others", () => {
    const rig = new Rig();
    rig.read(...first);
    rig.state.failed(new Unreachable("gone"), "5", 0);
    assert.equal(rig.state.options().resourceVersion, "5");
    rig.state.failed(new Forbidden("no", { code: "PERMISSION_DENIED" }), "5", 0);
    assert.equal(rig.state.options().resourceVersion, "");
    assert.equal(rig.state.resourceVersion, "5", "the store still has that state");
  });

  test("refuses a state of before its expired version, but not for ever", () => {
    const rig = new Rig();
    rig.read(...first);
    const tooOld = { code: "OUT_OF_RANGE", reason: "RESOURCE_VERSION_TOO_OLD" } as const;
    rig.state.failed(new Expired("old", tooOld), "50", 0);
    for (let count = 0; count < OLD_SNAPSHOTS_MAX; count++) {
      rig.connect();
      assert.throws(() => rig.read(begin("40")), Unreachable);
    }
    rig.connect();
    assert.deepEqual(rig.read(begin("40"), end("40")), ["delete a unknown", "delete b unknown"]);
    const other = new Rig();
    other.read(...first);
    other.state.failed(new Expired("other", { ...tooOld, reason: "HISTORY_REWRITTEN" }), "50", 0);
    other.connect();
    other.read(begin("3"), end("3"));
    assert.equal(other.state.resourceVersion, "3");
  });

  test("asks only for changes of its projection, and has no version of its own", () => {
    const options = new InformerState({ projection: Projection.metadata() }).options();
    assert.equal(options.onlyChanges, true);
    assert.equal(new InformerState({}).options().onlyChanges, undefined);
    const both = { paths: ["spec"], metadataOnly: true };
    assert.throws(() => new InformerState({ projection: both }), TypeError);
    const wrong = { resourceVersion: "5" } as InformerOptions;
    assert.throws(() => new InformerState(wrong), /starts with the present state/);
  });
});

suite("waiting calls", () => {
  const object = (version: string): KubeObject =>
    new KubeObject("", "a", "u", version, new Uint8Array());
  const add = (version: string): Notification => ({
    kind: "add",
    object: object(version),
    isInInitialList: false,
  });
  const update = (old: string, version: string): Notification => ({
    kind: "update",
    old: object(old),
    object: object(version),
  });
  const gone = (version: string): Notification => ({
    kind: "delete",
    object: object(version),
    finalStateUnknown: false,
  });

  function after(callsMax: number, ...calls: Waiting[]): string[] {
    const queue = new BacklogQueue(callsMax);
    for (const call of calls) {
      queue.push(call);
    }
    const seen: string[] = [];
    const size = queue.size;
    for (let call = queue.pop(); call !== undefined; call = queue.pop()) {
      seen.push(call.kind === "initialListEnd" ? call.kind : shown(call));
    }
    assert.deepEqual([size, queue.size], [seen.length, 0]);
    return seen;
  }

  test("come in order below the limit", () => {
    assert.deepEqual(after(9, add("1"), { kind: "initialListEnd" }, update("1", "2"), gone("3")), [
      "add a",
      "initialListEnd",
      "update a 1→2",
      "delete a",
    ]);
  });

  test("of one object are merged above it", () => {
    assert.deepEqual(after(0, update("1", "2"), update("2", "3")), ["update a 1→3"]);
    assert.deepEqual(after(0, add("1"), update("1", "2")), ["add a"]);
    assert.deepEqual(after(0, add("1"), gone("2")), []);
    assert.deepEqual(after(0, update("1", "2"), gone("3")), ["delete a"]);
    assert.deepEqual(after(0, gone("1"), add("2")), ["delete a", "add a"]);
  });

  test("do not fill the memory if objects come and go", () => {
    const queue = new BacklogQueue(2);
    for (let round = 0; round < 10_000; round++) {
      queue.push(add("1"));
      queue.push(gone("2"));
    }
    assert(queue.size <= 3);
    assert(queue.pop() !== undefined);
  });
});
