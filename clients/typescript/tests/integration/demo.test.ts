// The duties of a client, against a real kubefan with a simulated cluster.

import assert from "node:assert/strict";
import { createServer, connect, type Socket } from "node:net";
import { after, before, suite, test } from "node:test";
import {
  Client,
  Encoding,
  Expired,
  InvalidArgument,
  NotFound,
  Projection,
  Unavailable,
  type WatchItem,
} from "../../src/index.js";
import { Recorder, until } from "../unit/recorder.js";
import { Demo, skip } from "./processes.js";

const FAST = { initialMs: 20, maxMs: 100 };

suite("a real kubefan", { skip, concurrency: false }, () => {
  let demo: Demo;
  before(async () => {
    demo = await Demo.start();
  });
  after(async () => {
    await demo[Symbol.asyncDispose]();
  });

  test("sends what exists, then every change, in order", async () => {
    await using client = await Client.connect(demo.address);
    const watch = client.watch("pods");
    const versions = new Map<string, bigint>();
    let additions = 0;
    for await (const { type, object } of watch) {
      const version = BigInt(object.resourceVersion);
      assert(version > (versions.get(object.key) ?? 0n), "no event is repeated or reordered");
      versions.set(object.key, version);
      additions += type === "ADDED" ? 1 : 0;
      assert.equal(object.value["kind"], "Pod");
      if (additions > 50 && watch.resumeVersion !== "" && type === "MODIFIED") {
        break;
      }
    }
    assert.notEqual(watch.cluster, undefined);
  });

  test("answers reads, with errors that say what is wrong", async () => {
    await using client = new Client(demo.address);
    const pods = await client.list("po");
    assert(pods.objects.length >= 50);
    assert.equal(pods.resource?.kind, "Pod");
    const keys = pods.objects.map((one) => one.key);
    const [first] = pods.objects;
    assert(first !== undefined);
    assert.deepEqual([...new Set(keys)].length, keys.length);
    const one = await client.get("pods", first.name, first.namespace);
    assert.equal(one.uid, first.uid);
    const [status] = await client.listResources();
    assert.deepEqual([status?.name, status?.state], ["pods", "SYNCED"]);
    await assert.rejects(client.get("pods", "none", "none"), (error) => {
      assert(error instanceof NotFound);
      assert.equal(error.reason, "OBJECT_NOT_FOUND");
      return true;
    });
    await assert.rejects(client.list("pods", { labelSelector: "app==(" }), (error) => {
      assert(error instanceof InvalidArgument);
      assert.equal(error.field, "target.label_selector");
      return true;
    });
    await assert.rejects(client.watch("pods", { fieldSelector: "spec.none=1" }).next(), {
      name: "InvalidArgument",
    });
    await assert.rejects(client.list("pods", { resourceVersion: "999999999999" }), (error) => {
      assert(error instanceof Unavailable && error.isRetryable);
      return true;
    });
  });

  test("brings the same objects with every encoding and its projection", async () => {
    await using client = new Client(demo.address);
    const projection = Projection.fields("metadata.labels", "status.phase");
    for (const encoding of Object.values(Encoding)) {
      const watch = client.watch("pods", { encoding, projection, onlyChanges: true });
      let count = 0;
      for await (const { object, type } of watch) {
        const parts = Object.keys(object.value).sort().join();
        assert(type === "DELETED" || parts === "metadata,status", parts);
        if (++count === 104) {
          break;
        }
      }
    }
    // With deltas the watch has every object in canonical form.
    const deltas = client.informer("pods", { encoding: Encoding.ZSTD_DELTA });
    await using informer = deltas.start();
    assert(await informer.waitForSync({ timeoutMs: 30_000 }));
    const updates: string[] = [];
    informer.addEventHandler({
      onUpdate: (_, object) => updates.push(object.resourceVersion),
    });
    await until("updates", () => updates.length >= 5);
    const made = informer.indexer.list()[0];
    assert(made !== undefined);
    const metadata = made.value["metadata"] as Record<string, unknown>;
    assert(!("managedFields" in metadata) && !("resourceVersion" in metadata));
  });

  test("resumes over a cut connection with no event lost or repeated", async () => {
    const sockets = new Set<Socket>();
    const [host = "", port] = demo.address.split(":");
    const proxy = createServer((near) => {
      const far = connect(Number(port), host);
      for (const socket of [near, far]) {
        sockets.add(socket);
        socket.on("error", () => undefined);
        socket.on("close", () => {
          near.destroy();
          far.destroy();
        });
      }
      near.pipe(far).pipe(near);
    });
    await new Promise<void>((resolve) => proxy.listen(0, "127.0.0.1", resolve));
    const bound = proxy.address();
    assert(typeof bound === "object" && bound !== null);
    await using direct = new Client(demo.address);
    await using client = new Client(`127.0.0.1:${String(bound.port)}`);
    const { resourceVersion, cluster } = await direct.list("pods");
    const options = { resourceVersion, cluster, backoff: FAST };
    const whole = new Recorder(direct.watch("pods", options));
    const broken = new Recorder(client.watchItems("pods", options));
    for (let cut = 1; cut <= 5; cut++) {
      const before = broken.names().length;
      await until("events", () => broken.names().length >= before + 10);
      sockets.forEach((socket) => socket.destroy());
      await until("the resume", () => {
        return broken.kinds().filter((kind) => kind === "reconnected").length >= cut;
      });
    }
    const count = broken.names().length + 10;
    await until("more events", () => broken.names().length >= count);
    await until("as many", () => whole.names().length >= count);
    const versions = (items: WatchItem[]): string[] =>
      items
        .flatMap((one) => (one.kind === "event" ? [one.object.resourceVersion] : []))
        .slice(0, count);
    assert.deepEqual(versions(broken.seen), versions(whole.seen));
    sockets.forEach((socket) => socket.destroy());
    proxy.close();
  });

  test("ends a watch with a version of another cluster, and restarts it if asked", async () => {
    await using client = new Client(demo.address);
    const { resourceVersion } = await client.list("pods");
    const options = { resourceVersion, cluster: "another", backoff: FAST };
    await assert.rejects(client.watch("pods", options).next(), (error) => {
      assert(error instanceof Expired);
      assert.equal(error.reason, "HISTORY_REWRITTEN");
      return true;
    });
    const restarted = client.watchItems("pods", { ...options, onExpired: "restart" });
    for await (const item of restarted) {
      assert(item.kind === "snapshotBegin");
      assert.equal(item.restartedFrom, resourceVersion.split(".", 1)[0]);
      break;
    }
  });

  test("keeps the store of an informer equal to its own state", async () => {
    await using client = new Client(demo.address);
    await using informer = client.informer("pods").start();
    assert(await informer.waitForSync({ timeoutMs: 30_000 }));
    const { resourceVersion, objects } = await client.list("pods");
    const [number = ""] = resourceVersion.split(".", 1);
    assert(await informer.waitUntil(resourceVersion, { timeoutMs: 30_000 }));
    // Objects that have changed since are left out.
    let compared = 0;
    for (const one of objects) {
      const stored = informer.indexer.get(one.key);
      if (stored !== undefined && BigInt(stored.resourceVersion) <= BigInt(number)) {
        assert(stored.equals(one));
        compared++;
      }
    }
    assert(compared > 0);
    assert(informer.indexer.indexValues("namespace").length > 0);
  });
});

test("a drain costs no event, and a watch waits for the next kubefan", { skip }, async () => {
  const first = await Demo.start();
  await using client = new Client(first.address);
  const recorder = new Recorder(client.watchItems("pods", { backoff: FAST }));
  await until("the snapshot", () => recorder.kinds().includes("snapshotEnd"));
  await first.process.end("SIGTERM");
  await until("the break", () => recorder.kinds().includes("disconnected"));
  const before = recorder.names().length;
  await using next = await Demo.start([], first.address);
  await until("the next events", () => recorder.names().length > before);
  assert(next.process.isRunning && recorder.kinds().includes("reconnected"));
  const drained = recorder.seen.find((item) => item.kind === "disconnected");
  assert.equal(drained?.error.reason, "DRAINING");
});
