// The state machine of a watch, with recorded sequences of messages.

import assert from "node:assert/strict";
import { suite, test } from "node:test";
import { toBinary } from "@bufbuild/protobuf";
import { BinaryWriter } from "@bufbuild/protobuf/wire";
import { crc32 } from "../../src/crc32.js";
import { Expired, Forbidden, Unauthenticated, Unavailable, Unreachable } from "../../src/errors.js";
import * as api from "../../src/gen/kubefan/v1alpha1/watch_pb.js";
import type { WatchItem } from "../../src/items.js";
import { Encoding, OnExpired, OnLag, Projection, type WatchOptions } from "../../src/options.js";
import { STREAM_MS_MIN, WatchState, type Surroundings } from "../../src/watch-state.js";
import * as messages from "./messages.js";
import { fakeZstd, frame } from "./zstd.js";

const { begin, end, event, made } = messages;
const bytes = (text: string): Uint8Array => new TextEncoder().encode(text);

function state(options: WatchOptions = {}, surroundings: Surroundings = {}): WatchState {
  return new WatchState("pods", options, { address: "h:1", random: () => 0.5, ...surroundings });
}

function opened(machine: WatchState, now = 0): api.WatchRequest {
  const request = machine.request(now);
  assert(request !== undefined);
  machine.opened(now);
  return request;
}

function read(machine: WatchState, ...responses: api.WatchResponse[]): WatchItem[] {
  return responses.flatMap((response) => machine.accept(response, 0));
}

function synced(options: WatchOptions = {}, surroundings: Surroundings = {}): WatchState {
  const machine = state(options, surroundings);
  opened(machine);
  read(machine, ...messages.first());
  return machine;
}

function only(items: WatchItem[]): WatchItem {
  assert.equal(items.length, 1);
  const [item] = items;
  assert(item !== undefined);
  return item;
}

const kinds = (items: WatchItem[]): string[] => items.map((item) => item.kind);

suite("a watch", () => {
  test("starts with a snapshot and resumes only from resume versions", () => {
    const machine = state();
    const request = opened(machine);
    assert.deepEqual([request.resourceVersion, request.cluster], ["", ""]);
    assert.equal(request.onLag, api.OnLag.CONFLATE);
    assert.equal(request.onExpired, api.OnExpired.RESTART);
    const seen: WatchItem[] = [];
    const versions: string[] = [];
    for (const message of [
      begin("5"),
      event("ADDED", "a", "3"),
      end("5", 1),
      event("MODIFIED", "a", "7", "7"),
      messages.gapBegin("7"),
      event("ADDED", "b", "9"),
      messages.bookmark(""),
    ]) {
      seen.push(...machine.accept(message, 0));
      versions.push(machine.resumeVersion);
    }
    assert.deepEqual(versions, ["", "", "5", "7", "7", "7", "7"]);
    assert.deepEqual(kinds(seen), [
      "snapshotBegin",
      "event",
      "snapshotEnd",
      "event",
      "gapBegin",
      "event",
      "bookmark",
    ]);
    const again = opened(machine, 1_000);
    assert.deepEqual([again.resourceVersion, again.cluster], ["7", "c1"]);
  });

  for (const [version, isComplete, text] of [
    ["218", true, "218.end"],
    ["218", false, "218"],
    ["218.1", false, "218.1"],
  ] as const) {
    test(`sends the version ${text} back as it was received`, () => {
      const machine = state();
      assert.equal(opened(machine).versionIsComplete, undefined);
      read(machine, messages.complete(messages.bookmark("")));
      assert.equal(machine.resumeVersion, "");
      const bookmark = messages.bookmark(version);
      const item = only(read(machine, isComplete ? messages.complete(bookmark) : bookmark));
      assert.deepEqual(item, { kind: "bookmark", resumeVersion: text });
      assert.equal(machine.resumeVersion, text);
      for (const request of [opened(machine), opened(state({ resourceVersion: text }))]) {
        assert.deepEqual(
          [request.resourceVersion, request.versionIsComplete],
          [version, isComplete],
        );
      }
    });
  }

  test("takes a cluster only with the version that the snapshot ends with", () => {
    const machine = synced();
    read(machine, begin("50", "5", "c2"));
    assert.deepEqual([machine.resumeVersion, machine.cluster], ["5", "c1"]);
    read(machine, end("50"));
    assert.deepEqual([machine.resumeVersion, machine.cluster], ["50", "c2"]);
  });

  test("reports a break once, with its delay and its end", () => {
    const machine = synced();
    const lost = new Unreachable("gone", { code: "UNAVAILABLE" });
    assert.deepEqual(only(machine.failed(lost, 10_000)), {
      kind: "disconnected",
      error: lost,
      retryInMs: 1_200,
      resumeVersion: "",
    });
    assert.equal(machine.delay(10_000), 1_200);
    assert(machine.request(12_000) !== undefined);
    assert.deepEqual(machine.opened(12_000), [
      { kind: "reconnected", since: "5", resumeVersion: "" },
    ]);
    assert.deepEqual(machine.opened(12_000), []);
  });

  test("never waits shorter than the server asks for", () => {
    const asked = new Unavailable("x", { code: "UNAVAILABLE", retryAfterMs: 9_000 });
    const item = only(synced().failed(asked, 0));
    assert(item.kind === "disconnected");
    assert.equal(item.retryInMs, 9_000);
  });

  for (const reason of ["REBALANCED", "CONNECTION_AGE"]) {
    test(`that is moved with ${reason} resumes at once without an item`, () => {
      const machine = synced();
      const moved = new Unavailable("m", { code: "UNAVAILABLE", reason, retryAfterMs: 0 });
      assert.deepEqual(machine.failed(moved, 6_000), []);
      assert.equal(machine.delay(6_000), 0);
      opened(machine, 6_000);
      const sooner = only(machine.failed(moved, 7_000));
      assert.equal(sooner.kind, "disconnected", "moved at once is a failure");
    });
  }

  for (const reason of ["DRAINING", "SWITCHED", "DISCONNECTED", "REAUTHENTICATE"]) {
    test(`that ends with ${reason} has a break and resumes`, () => {
      const machine = synced();
      const ended = new Unavailable("x", { code: "UNAVAILABLE", reason, retryAfterMs: 100 });
      assert.equal(only(machine.failed(ended, 60_000)).kind, "disconnected");
      assert.equal(opened(machine, 62_000).resourceVersion, "5");
    });
  }

  test("ends with an error that a retry cannot resolve", () => {
    const machine = synced();
    const denied = new Forbidden("no", { code: "PERMISSION_DENIED", reason: "FORBIDDEN" });
    assert.throws(() => machine.failed(denied, 1_000), denied);
    assert(machine.ended);
  });

  test("restarts or fails after an expired version, as asked", () => {
    const old = new Expired("too old resource version: 5 (9)", {
      code: "OUT_OF_RANGE",
      reason: "RESOURCE_VERSION_TOO_OLD",
    });
    const machine = synced();
    assert.equal(only(machine.failed(old, 1_000)).kind, "restarted");
    const request = opened(machine, 3_000);
    assert.deepEqual([request.resourceVersion, request.cluster], ["", ""]);
    const strict = synced({ onExpired: OnExpired.FAIL });
    assert.throws(() => strict.failed(old, 1_000), /list again/);
    assert.equal(opened(state({ onExpired: OnExpired.FAIL })).onExpired, api.OnExpired.FAIL);
    assert.equal(opened(state({ onLag: OnLag.EXPIRE })).onLag, api.OnLag.EXPIRE);
  });

  test("continues after a refused token only if it may change and was accepted once", () => {
    const refused = new Unauthenticated("who?", { code: "UNAUTHENTICATED" });
    const fresh = state();
    assert(fresh.request(0) !== undefined);
    assert.throws(() => fresh.failed(refused, 0, true), Unauthenticated);
    assert.equal(only(synced().failed(refused, 1_000, true)).kind, "disconnected");
    assert.throws(() => synced().failed(refused, 1_000), Unauthenticated);
  });

  test("counts its timeout over all connections", () => {
    const machine = state({ timeoutMs: 10_000 });
    assert.equal(opened(machine, 100_000).timeoutSeconds, 10n);
    machine.failed(new Unreachable("gone"), 104_000);
    assert.equal(machine.delay(109_900), 0);
    assert.equal(opened(machine, 107_500).timeoutSeconds, 3n);
    assert.deepEqual(machine.finished(110_000), []);
    assert(machine.ended);
  });

  test("has a limit for each stream, so that a dead proxy is noticed", () => {
    const machine = synced();
    opened(machine);
    const limit = machine.callMs(0);
    assert(limit >= STREAM_MS_MIN && limit <= 2 * STREAM_MS_MIN + 3_000);
    const late = new Unavailable("deadline", { code: "DEADLINE_EXCEEDED" });
    assert.deepEqual(machine.failed(late, 700_000), [], "no break for the caller");
    assert.equal(machine.delay(700_000), 0);
  });

  test("does not ask in a loop if the server ends every stream at once", () => {
    const machine = synced();
    opened(machine, 50_000);
    assert.equal(only(machine.finished(50_100)).kind, "disconnected");
  });

  test("moves its version at the end of a catch-up, and for an unknown message", () => {
    const machine = synced();
    read(machine, messages.catchUpBegin("5"), event("DELETED", "a", "3", "", { unknown: true }));
    assert.equal(machine.resumeVersion, "5");
    read(machine, messages.catchUpEnd("20"));
    assert.equal(machine.resumeVersion, "20");
    assert.deepEqual(kinds(read(machine, messages.unknown("21"))), ["bookmark"]);
    assert.equal(machine.resumeVersion, "21");
  });

  test("asks for a projection, for changes only, and for bookmarks", () => {
    const projection = Projection.fields("spec.nodeName");
    const options = { projection, onlyChanges: true, bookmarkIntervalMs: 1_500 };
    const request = opened(state(options));
    assert.equal(request.projection?.type, api.ProjectionType.FIELD_MASK);
    assert.deepEqual(request.projection.paths, ["spec.nodeName"]);
    assert(request.projection.onlyChanges);
    assert.deepEqual(
      [request.bookmarkInterval?.seconds, request.bookmarkInterval?.nanos],
      [1n, 500_000_000],
    );
    assert.equal(opened(state()).projection, undefined);
    const both = { paths: ["spec"], metadataOnly: true };
    assert.throws(() => state({ projection: both }), TypeError);
  });
});

suite("deltas and chunks", () => {
  const zstd = fakeZstd();
  const options = { encoding: Encoding.ZSTD_DELTA };

  function chunk(...events: api.Event[]): api.WatchResponse {
    const writer = new BinaryWriter();
    for (const one of events) {
      writer.bytes(toBinary(api.EventSchema, one));
    }
    return messages.chunk(frame(writer.finish()));
  }

  function delta(name: string, version: string, base: Uint8Array, text: string): api.WatchResponse {
    return messages.delta(name, version, crc32(base), frame(bytes(text), base));
  }

  test("become events with whole objects", () => {
    const machine = state(options, { zstd });
    const request = opened(machine);
    assert.deepEqual([request.encoding, request.stateKept], [api.Encoding.ZSTD_DELTA, false]);
    const first = made("ADDED", "a", "3");
    const items = read(machine, begin("5"), chunk(first, made("ADDED", "b", "4")), end("5", 2));
    assert.deepEqual(kinds(items), ["snapshotBegin", "event", "event", "snapshotEnd"]);
    const item = only(read(machine, delta("a", "6", first.object, '{"new":true}')));
    assert(item.kind === "event");
    assert.deepEqual(item.object.raw, Buffer.from('{"new":true}'));
    assert.equal(item.object.value["new"], true);
    machine.failed(new Unreachable("gone"), 1_000);
    assert(opened(machine, 9_000).stateKept, "every object is here, as of the version");
  });

  test("with a wrong base are asked for again as whole objects", () => {
    const machine = synced(options, { zstd });
    const item = only(read(machine, delta("a", "6", bytes("other bytes"), "{}")));
    assert.equal(item.kind, "disconnected");
    const request = opened(machine, 9_000);
    assert.deepEqual(
      [request.resourceVersion, request.stateKept, request.encoding],
      ["5", false, api.Encoding.ZSTD_DELTA],
    );
  });

  test("have no base after a span that broke off", () => {
    const machine = synced(options, { zstd });
    read(machine, messages.gapBegin("5"), event("MODIFIED", "a", "7"));
    machine.failed(new Unreachable("gone"), 1_000);
    assert(!opened(machine, 9_000).stateKept);
    read(machine, messages.bookmark("5"));
    machine.failed(new Unreachable("gone"), 10_000);
    const request = opened(machine, 19_000);
    assert.deepEqual([request.resourceVersion, request.stateKept], ["5", false], "a is as of 7");
  });

  test("that are broken are refused, also with the right base", () => {
    const base = made("ADDED", "a", "1").object;
    const broken = Buffer.from(frame(bytes("{}"), base));
    broken.writeUInt8(0x00, broken.length - 1);
    for (const bad of [broken, frame(bytes("{}"), bytes("forged")), Buffer.from("nonsense")]) {
      const machine = synced(options, { zstd });
      const item = only(read(machine, messages.delta("a", "6", crc32(base), bad)));
      assert.equal(item.kind, "disconnected");
      assert.equal(machine.resumeVersion, "5");
    }
  });

  test("that would be too large are refused before memory is taken", () => {
    const huge = Buffer.from(frame(bytes("{}")));
    huge.writeUInt32LE(65 * 2 ** 20, 5);
    const machine = state(options, { zstd });
    opened(machine);
    const items = read(machine, begin("5"), messages.chunk(huge));
    assert.deepEqual(kinds(items), ["snapshotBegin", "disconnected"]);
  });

  test("above the memory limit are given up, in the same form", () => {
    const machine = synced({ ...options, deltaBaseBytesMax: 10 }, { zstd });
    read(machine, delta("a", "6", bytes("x"), "{}"));
    const request = opened(machine, 9_000);
    assert.equal(request.encoding, api.Encoding.ZSTD);
    assert(request.projection?.dropManagedFields);
    assert(!request.stateKept);
  });

  test("are not asked for by a Node that cannot decode them", () => {
    const asked = (encoding: Encoding, has: Surroundings["zstd"]): [api.Encoding, boolean] => {
      const request = opened(state({ encoding }, { zstd: has }));
      return [request.encoding, request.projection?.dropManagedFields === true];
    };
    assert.deepEqual(asked(Encoding.ZSTD, zstd), [api.Encoding.ZSTD, false]);
    assert.deepEqual(asked(Encoding.ZSTD, undefined), [api.Encoding.JSON, false]);
    assert.deepEqual(asked(Encoding.ZSTD_DELTA, fakeZstd(false)), [api.Encoding.ZSTD, true]);
    assert.deepEqual(asked(Encoding.ZSTD_DELTA, undefined), [api.Encoding.JSON, true]);
    assert.deepEqual(asked(Encoding.JSON, zstd), [api.Encoding.JSON, false]);
  });
});
