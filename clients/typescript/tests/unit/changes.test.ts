// Items become events that stand for themselves.

import assert from "node:assert/strict";
import { suite, test } from "node:test";
import { Changes } from "../../src/changes.js";
import { Unreachable } from "../../src/errors.js";
import type * as api from "../../src/gen/kubefan/v1alpha1/watch_pb.js";
import { WatchState } from "../../src/watch-state.js";
import { begin, catchUpBegin, catchUpEnd, end, event, gapBegin, gapEnd } from "./messages.js";

class Rig {
  readonly #machine = new WatchState("pods", {}, { random: () => 0 });
  readonly #changes = new Changes();

  constructor() {
    this.#machine.request(0);
    this.#machine.opened(0);
  }

  read(...messages: api.WatchResponse[]): string[] {
    return messages
      .flatMap((message) => this.#machine.accept(message, 0))
      .flatMap((item) => this.#changes.accept(item))
      .map(({ type, object, deleteReason, resumeVersion }) => {
        const reason = deleteReason === "FINAL_STATE_UNKNOWN" ? " unknown" : "";
        return `${type} ${object.name} ${object.resourceVersion}${reason} @${resumeVersion}`;
      });
  }

  break(): void {
    for (const item of this.#machine.failed(new Unreachable("gone"), 0)) {
      this.#changes.accept(item);
    }
  }
}

const first = [begin("5"), event("ADDED", "a", "1"), event("ADDED", "b", "2"), end("5", 2)];

suite("the events of a watch", () => {
  test("are those of the first snapshot, and then each change", () => {
    const rig = new Rig();
    assert.deepEqual(rig.read(...first), ["ADDED a 1 @", "ADDED b 2 @"]);
    assert.deepEqual(rig.read(event("MODIFIED", "a", "6", "6"), event("DELETED", "b", "7", "7")), [
      "MODIFIED a 6 @6",
      "DELETED b 7 @7",
    ]);
  });

  test("are only what differs, with real deletions, if the state is sent again", () => {
    const rig = new Rig();
    rig.read(...first);
    const again = [
      begin("20", "5"),
      event("ADDED", "b", "9"),
      event("ADDED", "c", "8"),
      end("20", 2),
    ];
    assert.deepEqual(rig.read(...again), [
      "MODIFIED b 9 @",
      "ADDED c 8 @",
      "DELETED a 1 unknown @20",
    ]);
    assert.deepEqual(rig.read(...again), [], "nothing has changed");
  });

  test("have a deletion and an addition for another object of the same name", () => {
    const rig = new Rig();
    rig.read(...first);
    const other = event("ADDED", "a", "9", "", { uid: "new" });
    assert.deepEqual(rig.read(begin("20"), other, event("ADDED", "b", "2"), end("20")), [
      "DELETED a 1 unknown @",
      "ADDED a 9 @",
    ]);
  });

  for (const [name, unitBegin, unitEnd] of [
    ["gap", gapBegin, gapEnd],
    ["catch-up", catchUpBegin, catchUpEnd],
  ] as const) {
    test(`of a ${name} come at its end, or not at all`, () => {
      const rig = new Rig();
      rig.read(...first);
      assert.deepEqual(rig.read(unitBegin("5"), event("ADDED", "ghost", "6")), []);
      rig.break();
      assert.deepEqual(
        rig.read(
          unitBegin("5"),
          event("DELETED", "a", "1", "", { unknown: true }),
          event("ADDED", "c", "8"),
          unitEnd("9"),
        ),
        ["DELETED a 1 unknown @", "ADDED c 8 @9"],
      );
      assert.deepEqual(rig.read(unitBegin("9"), unitEnd("12")), []);
    });
  }

  test("of a snapshot that broke off are not repeated by the next one", () => {
    const rig = new Rig();
    assert.deepEqual(rig.read(begin("5"), event("ADDED", "a", "1")), ["ADDED a 1 @"]);
    rig.break();
    assert.deepEqual(rig.read(begin("6"), event("ADDED", "b", "2"), end("6")), [
      "ADDED b 2 @",
      "DELETED a 1 unknown @6",
    ]);
  });
});
