// The client and its watches, against a server with scripts.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, suite, test } from "node:test";
import { create } from "@bufbuild/protobuf";
import { Code } from "@connectrpc/connect";
import { Client } from "../../src/client.js";
import {
  Expired,
  Forbidden,
  InvalidArgument,
  KubefanError,
  LimitReached,
  NotCached,
  ProtocolError,
  Unauthenticated,
  Undecodable,
  Unreachable,
} from "../../src/errors.js";
import * as api from "../../src/gen/kubefan/v1alpha1/watch_pb.js";
import * as messages from "./messages.js";
import { FAST, Recorder, until } from "./recorder.js";
import { Server, ends, errorWith, fails, sends, type Script } from "./server.js";

const { begin, end, event, first } = messages;
const directory = mkdtempSync(join(tmpdir(), "kubefan-"));
after(() => {
  rmSync(directory, { recursive: true });
});
let sockets = 0;
const socketPath = (): string => join(directory, `socket-${String(sockets++)}`);

suite("a watch", () => {
  test("resumes after its last version, and repeats no event", async () => {
    const lost = fails(Code.Unavailable, "DRAINING", "drains", 1);
    await using server = await Server.start([
      sends([...first(), event("MODIFIED", "a", "6", "6")], lost),
      sends([event("MODIFIED", "a", "7", "7")]),
    ]);
    await using client = new Client(server.address);
    const watch = client.watchItems("pods", { backoff: FAST });
    const recorder = new Recorder(watch);
    await recorder.until("both changes", "ADDED a", "MODIFIED a", "MODIFIED a");
    assert.deepEqual(
      server.requests.map((request) => [request.resourceVersion, request.cluster]),
      [
        ["", ""],
        ["6", "c1"],
      ],
    );
    assert.deepEqual(recorder.kinds(), [
      "snapshotBegin",
      "snapshotEnd",
      "disconnected",
      "reconnected",
    ]);
    assert.deepEqual([watch.resumeVersion, watch.cluster], ["7", "c1"]);
  });

  test("resumes after its connection was cut, and inside a gap from before it", async () => {
    await using server = await Server.start([
      sends([...first(), messages.gapBegin("5"), event("ADDED", "ghost", "6")]),
      sends([messages.gapBegin("5"), event("ADDED", "b", "7"), messages.gapEnd("8")]),
    ]);
    await using client = new Client(server.address);
    const items = new Recorder(client.watchItems("pods", { backoff: FAST }));
    await items.until("the part of the gap", "ADDED a", "ADDED ghost");
    server.cut();
    await items.until("the gap", "ADDED a", "ADDED ghost", "ADDED b");
    assert.equal(server.requests[1]?.resourceVersion, "5");
    const broken = items.seen.find((item) => item.kind === "disconnected");
    assert(broken?.error instanceof Unreachable);
  });

  test("has the events of a gap and a catch-up only when they are complete", async () => {
    const lost = fails(Code.Unavailable, "STOPPED", "stopped", 1);
    await using server = await Server.start([
      sends([...first(), messages.gapBegin("5"), event("ADDED", "ghost", "6")], lost),
      sends([
        messages.catchUpBegin("5"),
        event("DELETED", "a", "1", "", { unknown: true }),
        event("ADDED", "b", "7"),
        messages.catchUpEnd("8"),
      ]),
    ]);
    await using client = new Client(server.address);
    const watch = client.watch("pods", { backoff: FAST });
    const recorder = new Recorder(watch);
    await recorder.until("the catch-up", "ADDED a", "DELETED a", "ADDED b");
    const versions = recorder.seen.map((one) => one.resumeVersion);
    assert.deepEqual(versions, ["", "", "8"]);
    assert.equal(recorder.seen[1]?.deleteReason, "FINAL_STATE_UNKNOWN");
    assert.equal(watch.resumeVersion, "8");
  });

  test("starts over after an expired version, with only what differs", async () => {
    const old = fails(Code.OutOfRange, "RESOURCE_VERSION_TOO_OLD", "too old resource version");
    await using server = await Server.start([
      sends(first(), old),
      sends([begin("20"), event("ADDED", "b", "19"), end("20", 1)]),
    ]);
    await using client = new Client(server.address);
    const recorder = new Recorder(client.watch("pods", { backoff: FAST }));
    await recorder.until("the new state", "ADDED a", "ADDED b", "DELETED a");
    assert.deepEqual(
      server.requests.map((request) => request.resourceVersion),
      ["", ""],
    );
  });

  test("from a version of the caller's ends with Expired", async () => {
    const old = fails(Code.OutOfRange, "HISTORY_REWRITTEN", "another history");
    await using server = await Server.start([old, old]);
    await using client = new Client(server.address);
    const recorder = new Recorder(client.watch("pods", { resourceVersion: "3", cluster: "c" }));
    await recorder.untilEnded();
    assert(recorder.error instanceof Expired);
    assert.match(recorder.error.message, /list again/);
    assert.equal(server.requests[0]?.onExpired, api.OnExpired.FAIL);
    assert.deepEqual([server.requests[0].resourceVersion, server.requests[0].cluster], ["3", "c"]);
  });

  test("ends with the error of a denial", async () => {
    const denied = fails(Code.PermissionDenied, "FORBIDDEN", 'User "u" cannot list pods');
    await using server = await Server.start([denied]);
    await using client = new Client(server.address);
    const recorder = new Recorder(client.watch("pods"));
    await recorder.untilEnded();
    assert(recorder.error instanceof Forbidden);
    const { reason, code } = recorder.error;
    assert.deepEqual([reason, code], ["FORBIDDEN", "PERMISSION_DENIED"]);
    assert.match(recorder.error.message, /cannot list pods/);
    assert.deepEqual(await recorder.watch.next(), { done: true, value: undefined });
  });

  test("asks again for a message that it cannot decode", async () => {
    const broken = messages.delta("a", "7", 0, Buffer.from("nonsense"));
    await using server = await Server.start([
      sends([...first(), broken]),
      sends([event("MODIFIED", "a", "7", "7")]),
    ]);
    await using client = new Client(server.address);
    const recorder = new Recorder(client.watchItems("pods", { backoff: FAST }));
    await recorder.until("the change", "ADDED a", "MODIFIED a");
    const item = recorder.seen.find((one) => one.kind === "disconnected");
    assert(item?.error instanceof Undecodable);
    assert.equal(server.requests[1]?.resourceVersion, "5");
  });

  test("ends at its timeout, when it is closed, left or aborted, and with its client", async () => {
    await using server = await Server.start([sends(first(), ends), ends]);
    await using client = new Client(server.address);
    const timed = new Recorder(client.watch("pods", { timeoutMs: 300 }));
    await timed.untilEnded();
    assert.deepEqual([timed.names(), timed.error], [["ADDED a"], undefined]);

    const aborted = new AbortController();
    const watches = [
      client.watch("pods"),
      client.watch("pods", { signal: aborted.signal }),
      client.watch("pods"),
    ];
    const calls = server.requests.length + watches.length;
    const recorders = watches.map((watch) => new Recorder(watch));
    await until("the calls", () => server.requests.length >= calls);
    watches[0]?.close();
    aborted.abort();
    await recorders[0]?.untilEnded();
    await recorders[1]?.untilEnded();
    assert.equal(recorders[2]?.ended, false);
    client.close();
    await recorders[2].untilEnded();
    assert.deepEqual(
      recorders.map((recorder) => recorder.error),
      [undefined, undefined, undefined],
    );
    const late = client.watch("pods", { signal: AbortSignal.abort() });
    assert.equal((await late.next()).done, true);
  });

  test("is one of many of its client, without a warning", async () => {
    const warnings: Error[] = [];
    const note = (warning: Error): unknown => warnings.push(warning);
    process.on("warning", note);
    await using server = await Server.start();
    await using client = new Client(server.address);
    const recorders = Array.from({ length: 20 }, () => new Recorder(client.watch("pods")));
    await until("the calls", () => server.requests.length === recorders.length);
    client.close();
    await Promise.all(recorders.map((recorder) => recorder.untilEnded()));
    process.off("warning", note);
    assert.deepEqual(warnings, []);
  });

  test("ends its call when the loop is left", async () => {
    let isOver = false;
    const script: Script = (request, context) => {
      context.signal.addEventListener("abort", () => {
        isOver = true;
      });
      return sends(first())(request, context);
    };
    await using server = await Server.start([script]);
    await using client = new Client(server.address);
    for await (const one of client.watch("pods")) {
      assert.equal(one.object.value["value"], "1");
      break;
    }
    await until("the end of the call", () => isOver);
  });

  test("waits for a server that is not there, for as long as its backoff says", async () => {
    const path = socketPath();
    await using client = new Client(`unix:${path}`);
    const backoff = { initialMs: 20, maxMs: 20, jitter: 0 };
    const recorder = new Recorder(client.watchItems("pods", { backoff }));
    await until("two attempts", () => recorder.seen.length >= 2);
    for (const item of recorder.seen) {
      assert(item.kind === "disconnected" && item.error instanceof Unreachable);
      assert.equal(item.retryInMs, 20);
    }
    await using server = await Server.start([sends(first())], { path });
    await recorder.until("the state", "ADDED a");
    assert.equal(server.requests.length, 1);
  });

  test("leaves a server that accepts connections and says nothing", async () => {
    const silent = createServer((socket) => socket.on("error", () => undefined));
    await new Promise<void>((resolve) => silent.listen(0, "127.0.0.1", resolve));
    const bound = silent.address();
    assert(typeof bound === "object" && bound !== null);
    const address = `127.0.0.1:${String(bound.port)}`;
    await using client = new Client(address, { connectTimeoutMs: 50 });
    await assert.rejects(client.list("pods"), (error) => error instanceof Unreachable);
    silent.close();
  });

  test("notices a connection that leads nowhere by its PINGs", async () => {
    // A proxy that can freeze: its connections stay open, and nothing passes any more.
    const held = new Set<Socket>();
    let isFrozen = false;
    // On a busy machine a PING may be late on a connection that is well. The watch resumes then,
    // and gets the change only over a connection that it has opened after the others froze.
    const script: Script = (request, context) => {
      const next = isFrozen ? [event("ADDED", "b", "7", "7")] : [];
      const messages = request.resourceVersion === "5" ? next : first();
      return sends(request.resourceVersion === "7" ? [] : messages)(request, context);
    };
    await using server = await Server.start(Array.from({ length: 1_000 }, () => script));
    const port = Number(server.address.split(":")[1]);
    const proxy = createServer((near) => {
      const far = new (near.constructor as new () => Socket)();
      far.connect(port, "127.0.0.1");
      const isOld = !isFrozen;
      for (const [from, to] of [
        [near, far],
        [far, near],
      ] as const) {
        held.add(from);
        from.on("error", () => undefined);
        from.on("data", (data) => {
          if (!(isOld && isFrozen)) {
            to.write(data);
          }
        });
      }
    });
    await new Promise<void>((resolve) => proxy.listen(0, "127.0.0.1", resolve));
    const bound = proxy.address();
    assert(typeof bound === "object" && bound !== null);
    const client = new Client(`127.0.0.1:${String(bound.port)}`, {
      keepaliveIntervalMs: 100,
      keepaliveTimeoutMs: 2_000,
    });
    const recorder = new Recorder(client.watchItems("pods", { backoff: FAST }));
    await until("the state", () => recorder.kinds().includes("snapshotEnd"));
    isFrozen = true;
    await until("the change, over a new connection", () => recorder.names().includes("ADDED b"));
    assert(server.requests.some(({ resourceVersion }) => resourceVersion === "5"));
    client.close();
    held.forEach((socket) => socket.destroy());
    proxy.close();
  });
});

suite("a token", () => {
  test("is read again when the stream ends because of it, and when it is refused", async () => {
    const file = join(directory, "token");
    writeFileSync(file, "first");
    const rotates: Script = function* () {
      yield* first();
      writeFileSync(file, "second");
      throw errorWith(Code.Unavailable, "REAUTHENTICATE", "the token has expired", 1);
    };
    const refuses = fails(Code.Unauthenticated, "UNAUTHENTICATED");
    const rotatesAndRefuses: Script = async function* (request, context) {
      writeFileSync(file, "third");
      yield* refuses(request, context);
    };
    await using server = await Server.start(
      [
        rotates,
        sends([event("MODIFIED", "a", "7", "7")], fails(Code.Unavailable, "STOPPED", "s", 1)),
        rotatesAndRefuses,
        sends([event("MODIFIED", "a", "8", "8")]),
      ],
      { path: socketPath() },
    );
    await using client = new Client(server.address, { tokenFile: file });
    const recorder = new Recorder(client.watchItems("pods", { backoff: FAST }));
    await recorder.until("both changes", "ADDED a", "MODIFIED a", "MODIFIED a");
    assert.deepEqual(server.tokens, [
      "Bearer first",
      "Bearer second",
      "Bearer second",
      "Bearer third",
    ]);
  });

  test("that was never accepted is a mistake", async () => {
    const refuses = fails(Code.Unauthenticated, "UNAUTHENTICATED", "not known");
    await using server = await Server.start([refuses], { path: socketPath() });
    await using client = new Client(server.address, { token: "secret" });
    const recorder = new Recorder(client.watch("pods"));
    await recorder.untilEnded();
    assert(recorder.error instanceof Unauthenticated);
    assert(!String(recorder.error).includes("secret"));
  });

  test("is not sent over plaintext TCP: the client refuses before it connects", async () => {
    await using server = await Server.start();
    assert.throws(() => new Client(server.address, { token: "secret" }), /only over TLS/);
    await assert.rejects(Client.connect(server.address, { token: "secret" }), /only over TLS/);
    assert.deepEqual(server.tokens, []);
  });

  test("of a list is asked for again once if it is refused", async () => {
    const file = join(directory, "token-of-list");
    writeFileSync(file, "old");
    let calls = 0;
    const list = (): api.ListResponse[] => {
      if (calls++ === 0) {
        writeFileSync(file, "new");
        throw errorWith(Code.Unauthenticated, "UNAUTHENTICATED", "who?");
      }
      return [create(api.ListResponseSchema, { resourceVersion: "1" })];
    };
    await using server = await Server.start([], { path: socketPath(), list });
    await using client = new Client(server.address, { tokenFile: file });
    assert.equal((await client.list("pods")).resourceVersion, "1");
    assert.deepEqual(server.tokens, ["Bearer old", "Bearer new"]);
  });
});

suite("a call", () => {
  const object = { namespace: "shop", name: "a", uid: "u", resourceVersion: "3" };

  test("lists in chunks, and can be aborted", async () => {
    const requests: api.ListRequest[] = [];
    const list = (request: api.ListRequest): api.ListResponse[] => {
      requests.push(request);
      const chunk = (name: string, more: object): api.ListResponse =>
        create(api.ListResponseSchema, {
          resourceVersion: "9",
          versionIsComplete: true,
          objects: [{ ...object, name, object: messages.raw(name) }],
          ...more,
        });
      const resource = { version: "v1", resource: "pods", kind: "Pod", namespaced: true };
      return [chunk("a", { cluster: "c1", resource }), chunk("b", {})];
    };
    await using server = await Server.start([], { list });
    await using client = await Client.connect(server.address);
    const found = await client.list("pods", {
      namespace: "shop",
      labelSelector: "app=web",
      resourceVersion: "8.end",
    });
    assert.deepEqual(
      [...found].map((one) => one.key),
      ["shop/a", "shop/b"],
    );
    assert.deepEqual([found.resourceVersion, found.cluster], ["9.end", "c1"]);
    assert.equal(found.resource?.kind, "Pod");
    assert.deepEqual(
      [requests[0]?.target?.namespace, requests[0]?.target?.labelSelector],
      ["shop", "app=web"],
    );
    assert.deepEqual(
      requests.map((request) => request.resourceVersion),
      ["8"],
    );
    const signal = AbortSignal.abort(new Error("no more"));
    await assert.rejects(client.list("pods", { signal }), /no more/);
    const [status] = await client.listResources();
    assert.deepEqual([status?.state, status?.objectCount], ["SYNCED", 3]);
    // The server has no such method, so it is no kubefan.
    await assert.rejects(client.get("pods", "a", "shop"), KubefanError);
  });

  test("rejects with an error that says what is wrong", async () => {
    const field = "target.label_selector";
    const failures = [
      errorWith(Code.InvalidArgument, "INVALID_ARGUMENT", "bad", undefined, field),
      errorWith(Code.FailedPrecondition, "NOT_CACHED", "pods is not cached"),
      errorWith(Code.ResourceExhausted, "LIMIT_REACHED", "too many", 1_500),
      errorWith(Code.Unavailable, "TLS_REQUIRED", "tls"),
    ];
    const list = (): never => {
      throw failures.shift() ?? new Error("no more");
    };
    await using server = await Server.start([], { list });
    await using client = new Client(server.address);
    const failure = async (): Promise<KubefanError> => {
      const error: unknown = await client.list("pods").then(
        () => undefined,
        (failed: unknown) => failed,
      );
      assert(error instanceof KubefanError);
      return error;
    };
    const invalid = await failure();
    assert(invalid instanceof InvalidArgument && !invalid.isRetryable);
    assert.deepEqual([invalid.field, invalid.reason], [field, "INVALID_ARGUMENT"]);
    assert.deepEqual(invalid.metadata, { resume_version: "7" });
    const uncached = await failure();
    assert(uncached instanceof NotCached);
    assert.match(uncached.message, /--resource/);
    const limited = await failure();
    assert(limited instanceof LimitReached && limited.isRetryable);
    assert.equal(limited.retryAfterMs, 1_500);
    const plain = await failure();
    assert(plain instanceof Unreachable);
    assert.match(plain.message, /use an https:\/\/ address/);
  });

  test("goes to the next address of a name if one does not answer", async () => {
    await using server = await Server.start();
    // If localhost also has an IPv6 address, no server listens there.
    await using client = new Client(`dns:localhost:${server.address.split(":")[1] ?? ""}`);
    for (let call = 0; call < 4; call++) {
      assert.equal((await client.listResources()).length, 1);
    }
  });

  test("without a kubefan is unreachable, or not of its protocol", async () => {
    await assert.rejects(Client.connect("127.0.0.1:1"), (error) => {
      assert(error instanceof Unreachable);
      assert.match(error.message, /ECONNREFUSED/);
      return true;
    });
    await using server = await Server.start();
    await using client = new Client(server.address);
    await assert.rejects(client.list("pods"), ProtocolError, "a list without a version");
  });
});
