// Running informers, against a server with scripts.

import assert from "node:assert/strict";
import { suite, test } from "node:test";
import { Code } from "@connectrpc/connect";
import { Client } from "../../src/client.js";
import { Stopped } from "../../src/errors.js";
import type { Informer } from "../../src/informer.js";
import { begin, end, event, first } from "./messages.js";
import { FAST, WAIT_MS_MAX, until } from "./recorder.js";
import { Server, fails, sends } from "./server.js";

const wait = { timeoutMs: WAIT_MS_MAX };

/** Keeps the calls of a handler. */
function record(informer: Informer): string[] {
  const seen: string[] = [];
  informer.addEventHandler({
    onAdd: (object, isInInitialList) =>
      seen.push(`add ${object.name}${isInInitialList ? " initial" : ""}`),
    onUpdate: (old, object) =>
      seen.push(`update ${object.name} ${old.resourceVersion}→${object.resourceVersion}`),
    onDelete: ({ key, finalStateUnknown }) =>
      seen.push(`delete ${key}${finalStateUnknown ? " unknown" : ""}`),
  });
  return seen;
}

suite("an informer", () => {
  test("survives errors and reports them", async () => {
    await using server = await Server.start([
      fails(Code.PermissionDenied, "FORBIDDEN"),
      sends(first(), fails(Code.Unavailable, "STOPPED", "stopped", 1)),
      sends([event("DELETED", "a", "7", "7")]),
    ]);
    await using client = new Client(server.address);
    const errors: unknown[] = [];
    await using informer = client
      .informer("pods", { backoff: FAST })
      .onError((error) => errors.push(error));
    const seen = record(informer);
    informer.start();
    await until("the deletion", () => seen.includes("delete default/a"));
    assert.deepEqual(seen, ["add a initial", "delete default/a"]);
    assert.equal(informer.indexer.size, 0);
    assert.deepEqual(
      errors.map((error) => (error as Error).name),
      ["Forbidden", "Unavailable"],
    );
    assert.deepEqual(
      server.requests.map((request) => request.resourceVersion),
      ["", "", "5"],
    );
  });

  test("has real deletions after a relist", async () => {
    const old = fails(Code.OutOfRange, "RESOURCE_VERSION_TOO_OLD", "too old");
    await using server = await Server.start([
      sends(first(), old),
      sends([begin("20"), event("ADDED", "b", "19"), end("20", 1)]),
    ]);
    await using client = new Client(server.address);
    await using informer = client.informer("pods", { backoff: FAST }).onError(() => undefined);
    const seen = record(informer);
    informer.start();
    assert(await informer.waitUntil("20", wait));
    await until("the calls", () => seen.length === 3);
    assert.deepEqual(seen, ["add a initial", "delete default/a unknown", "add b"]);
    assert.deepEqual(informer.indexer.keys(), ["default/b"]);
  });

  test("waits until its store has a version, and stops for ever", async () => {
    const change = event("MODIFIED", "a", "9", "9");
    await using server = await Server.start([sends([...first(), change])]);
    await using client = new Client(server.address);
    const informer = client.informer("pods").start();
    assert(await informer.waitForSync(wait));
    assert(await informer.waitUntil("9", wait));
    assert(await informer.waitUntil("9.end", wait));
    assert(!(await informer.waitUntil("10", { timeoutMs: 10 })));
    await assert.rejects(informer.waitUntil("10", { signal: AbortSignal.timeout(10) }), {
      name: "TimeoutError",
    });
    await assert.rejects(informer.waitUntil("x"), TypeError);
    assert.equal(informer.indexer.get("default/a")?.resourceVersion, "9");
    const waiting = assert.rejects(informer.waitUntil("99"), Stopped);
    await informer.stop();
    await waiting;
    assert.equal(informer.indexer.size, 1, "the store stays readable");
    assert.throws(() => informer.start(), Stopped);
    assert.throws(() => informer.addEventHandler({}), Stopped);
  });

  test("stops with its signal and with its client", async () => {
    await using server = await Server.start([sends(first()), sends(first())]);
    const client = new Client(server.address);
    const abort = new AbortController();
    const one = client.informer("pods", { signal: abort.signal }).start();
    const other = client.informer("pods").start();
    assert((await one.waitForSync(wait)) && (await other.waitForSync(wait)));
    const ended = Promise.all([
      assert.rejects(one.waitUntil("99"), Stopped),
      assert.rejects(other.waitUntil("99"), Stopped),
    ]);
    abort.abort();
    client.close();
    await ended;
  });

  test("reports the error of a handler, and continues", async () => {
    const change = event("MODIFIED", "a", "6", "6");
    await using server = await Server.start([sends([...first(), change])]);
    await using client = new Client(server.address);
    const errors: unknown[] = [];
    let updates = 0;
    await using informer = client.informer("pods").onError((error) => errors.push(error));
    informer.addEventHandler({
      onAdd: () => {
        throw new RangeError("of the handler");
      },
      onUpdate: async () => {
        await Promise.resolve();
        updates++;
        throw new RangeError("of the handler, later");
      },
    });
    informer.start();
    await until("both errors", () => errors.length === 2);
    assert.equal(updates, 1);
    assert(errors.every((error) => error instanceof RangeError));
  });

  test("does not let a slow handler delay others, and gives a late one the state", async () => {
    const versions = Array.from({ length: 14 }, (_, at) => String(at + 6));
    const changes = versions.map((version) => event("MODIFIED", "a", version, version));
    await using server = await Server.start([sends([...first(), ...changes])]);
    await using client = new Client(server.address);
    await using informer = client.informer("pods");
    let release = (): void => undefined;
    const released = new Promise<undefined>((resolve) => {
      release = () => {
        resolve(undefined);
      };
    });
    const slow: string[] = [];
    const held = informer.addEventHandler(
      {
        onAdd: () => released,
        onUpdate: (old, { resourceVersion }) =>
          slow.push(`${old.resourceVersion}→${resourceVersion}`),
      },
      { backlogMax: 2 },
    );
    const quick: string[] = [];
    informer.addEventHandler({
      onUpdate: (_, { resourceVersion }) => quick.push(resourceVersion),
    });
    informer.start();
    await until("the last update", () => quick.at(-1) === "19");
    assert.deepEqual(quick, versions);
    assert(held.backlog <= 4);
    assert.equal(slow.join(), "");
    const late: string[] = [];
    const registration = informer.addEventHandler({
      onAdd: ({ resourceVersion }, isInitial) =>
        late.push(`${resourceVersion} ${String(isInitial)}`),
    });
    assert(await registration.waitForSync(wait));
    assert.deepEqual(late, ["19 true"]);
    release();
    assert(await held.waitForSync(wait));
    await until("the merged updates", () => slow.some((one) => one.endsWith("→19")));
    assert(slow.length < 14, "updates were merged");
    await registration.remove();
    await held.remove();
  });

  test("may be stopped by its own handler", async () => {
    await using server = await Server.start([sends(first())]);
    await using client = new Client(server.address);
    const informer = client.informer("pods");
    let stopped = false;
    informer.addEventHandler({
      onAdd: async () => {
        await informer.stop();
        stopped = true;
      },
    });
    informer.start();
    await until("the stop", () => stopped, 9_000);
  });
});
