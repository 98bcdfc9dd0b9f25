// Watches and reads that go on at an apiserver.

import assert from "node:assert/strict";
import { createServer } from "node:http";
import { suite, test } from "node:test";
import { Code } from "@connectrpc/connect";
import { Apiserver } from "../../src/apiserver.js";
import { Client } from "../../src/client.js";
import type { ClientOptions } from "../../src/endpoint.js";
import { Expired, Forbidden, InvalidArgument, NotFound } from "../../src/errors.js";
import type { WatchItem } from "../../src/items.js";
import { Fallback, OnExpired, type WatchOptions } from "../../src/options.js";
import { FakeApiserver, line, listed, type Answer } from "./apiserver.js";
import { event, first } from "./messages.js";
import { FAST, Recorder, until } from "./recorder.js";
import { Server, fails, sends, type Script } from "./server.js";

/** What a proxy without a kubefan answers. */
const GONE = fails(Code.Unavailable, "", "no healthy upstream");

/** The items as words: names and versions. */
function words(seen: readonly WatchItem[]): string[] {
  return seen.map((item) => {
    if (item.kind === "event") {
      return `${item.object.name} ${item.resumeVersion}`;
    }
    return item.resumeVersion === "" ? item.kind : `${item.kind} ${item.resumeVersion}`;
  });
}

/** A watch with a fallback whose window is a millisecond. */
class Scene implements AsyncDisposable {
  private constructor(
    readonly server: Server,
    readonly apiserver: FakeApiserver,
    readonly client: Client,
    readonly watch: Recorder<WatchItem>,
  ) {}

  static async start(
    scripts: Script[],
    answers: { lists?: object[]; watches?: Answer[] },
    options: WatchOptions & Pick<ClientOptions, "onSide"> = {},
  ): Promise<Scene> {
    const server = await Server.start(scripts);
    const apiserver = await FakeApiserver.start(answers.lists, answers.watches);
    const { onSide, ...watch } = options;
    const client = new Client(server.address, {
      apiserver: apiserver.client,
      budget: { clients: 1, rate: 1_000 },
      ...(onSide === undefined ? {} : { onSide }),
    });
    const items = client.watchItems("pods", { backoff: FAST, ...watch });
    return new Scene(server, apiserver, client, new Recorder(items));
  }

  async until(count: number): Promise<string[]> {
    await until(`${String(count)} items`, () => this.watch.seen.length >= count);
    return words(this.watch.seen);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.client.close();
    await this.watch.untilEnded();
    await this.apiserver[Symbol.asyncDispose]();
    await this.server[Symbol.asyncDispose]();
  }
}

suite("a watch with an apiserver", () => {
  test("continues there from its version, without events that it has", async () => {
    const sides: string[] = [];
    const brought = [
      line("MODIFIED", "a", "7"),
      line("ADDED", "b", "7"),
      line("DELETED", "b", "9"),
    ];
    await using scene = await Scene.start(
      [sends([...first(), event("MODIFIED", "a", "7", "7")], GONE), GONE],
      { watches: [brought] },
      { onSide: (side) => sides.push(side) },
    );
    const has = (): string[] => words(scene.watch.seen);
    await until("the events of the apiserver", () => has().includes("b 9"));
    // The headers of a refusal may arrive before it, so there may be more breaks than one.
    const lasting = has().filter((word) => !word.endsWith("connected"));
    assert.deepEqual(lasting, ["snapshotBegin", "a ", "snapshotEnd 5", "a 7", "b 7", "b 9"]);
    assert.equal(has().at(-3), "reconnected");
    assert.deepEqual([scene.apiserver.requests, sides], [["watch 6"], ["away"]]);
  });

  test("gets its state there if kubefan was never reached", async () => {
    const bookmark = { type: "BOOKMARK", object: { metadata: { resourceVersion: "30" } } };
    await using scene = await Scene.start([GONE], {
      lists: [listed("20", "a")],
      watches: [[line("ADDED", "b", "21"), bookmark]],
    });
    assert.deepEqual(await scene.until(7), [
      "disconnected",
      "reconnected",
      "snapshotBegin",
      "a ",
      "snapshotEnd 20.end",
      "b 21",
      "bookmark 30.end",
    ]);
    const object = scene.watch.seen[3];
    assert(object?.kind === "event");
    assert.equal(object.object.value["kind"], "Pod");
    assert.deepEqual(scene.apiserver.requests, ["list", "watch 20"]);
  });

  test("restarts or ends if its version has expired there", async () => {
    const answers = { lists: [listed("20")], watches: [410] };
    const resumes = { resourceVersion: "5" };
    {
      await using scene = await Scene.start([GONE], answers, {
        ...resumes,
        onExpired: OnExpired.RESTART,
      });
      const expected = ["disconnected", "restarted", "reconnected", "snapshotBegin"];
      assert.deepEqual(await scene.until(5), [...expected, "snapshotEnd 20.end"]);
    }
    await using scene = await Scene.start([GONE], answers, resumes);
    await scene.watch.untilEnded();
    assert(scene.watch.error instanceof Expired);
  });

  test("waits for kubefan if it is refused there", async () => {
    const script = sends([event("ADDED", "x", "6", "6")]);
    const options = { resourceVersion: "5" };
    await using scene = await Scene.start([GONE, script], { watches: [403] }, options);
    assert.deepEqual(await scene.until(4), ["disconnected", "disconnected", "reconnected", "x 6"]);
    const refused = scene.watch.seen[1];
    assert(refused?.kind === "disconnected" && refused.error instanceof Forbidden);
    assert.deepEqual(scene.apiserver.requests, ["watch 5"]);
  });

  test("is read there if kubefan has no answer, without an outage", async () => {
    const refused = fails(Code.FailedPrecondition, "NOT_CACHED");
    const options = { resourceVersion: "5", onSide: () => assert.fail("an outage") };
    const answers = { watches: [[line("ADDED", "x", "6")]] };
    await using scene = await Scene.start([refused], answers, options);
    assert.deepEqual(await scene.until(3), ["disconnected", "reconnected", "x 6"]);
  });

  test("waits if it is told so", async () => {
    const options = { fallback: Fallback.NEVER };
    await using scene = await Scene.start([GONE, GONE, sends(first())], {}, options);
    assert.equal((await scene.until(6)).at(-1), "snapshotEnd 5");
    assert.deepEqual(scene.apiserver.requests, []);
  });

  test("ends at its timeout there", async () => {
    const options = { resourceVersion: "5", timeoutMs: 300 };
    await using scene = await Scene.start([GONE], {}, options);
    await scene.watch.untilEnded();
    assert.equal(scene.watch.error, undefined);
    assert.deepEqual(scene.apiserver.requests, ["watch 5"]);
  });
});

test("a token of a kubeconfig is sent without TLS to this machine only", async () => {
  const sent: (string | undefined)[] = [];
  const server = createServer((request, response) => {
    sent.push(request.headers.authorization);
    response.end("{}");
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const bound = server.address();
  assert(typeof bound === "object" && bound !== null);
  const get = (host: string): Promise<unknown> => {
    const url = `http://${host}:${String(bound.port)}`;
    const apiserver = Apiserver.fromKubeConfig({
      getCurrentCluster: () => ({ server: url }),
      applyToHTTPSOptions: (options) => {
        Object.assign(options.headers ?? {}, { Authorization: "Bearer secret" });
        return Promise.resolve();
      },
    });
    const { signal } = new AbortController();
    const target = { name: "x" };
    const read = { resource: "pods", target, projection: {}, resolved: undefined, signal };
    return apiserver.get(read);
  };
  await get("127.0.0.1");
  for (const host of ["0.0.0.0", "127.0.0.1.example.com"]) {
    await assert.rejects(get(host), (error) => {
      assert(error instanceof InvalidArgument);
      assert(!error.isRetryable && error.message.includes("has no TLS"), error.message);
      return true;
    });
  }
  assert.deepEqual(sent, ["Bearer secret"]);
  server.close();
});

test("lists and gets are made at the apiserver too, and names are looked up", async () => {
  const server = await Server.start();
  const { address } = server;
  await server[Symbol.asyncDispose]();
  const resources = [{ resource: "widgets", scope: "Cluster", shortNames: ["wi"] }];
  const versions = [{ version: "v2", resources }];
  await using apiserver = await FakeApiserver.start([listed("20", "a"), listed("21")], [], {
    "/prefix/api": { items: [] },
    "/prefix/apis": { items: [{ metadata: { name: "example.com" }, versions }] },
  });
  const budget = { clients: 1, rate: 1_000 };
  await using client = await Client.connect(address, { apiserver: apiserver.client, budget });
  const found = await client.list("pods");
  assert.deepEqual([found.resourceVersion, found.objects[0]?.name], ["20.end", "a"]);
  assert.equal((await client.get("pods", "x", "default")).name, "x");
  const widgets = await client.list("wi", { namespace: "n" });
  assert.equal(widgets.resource?.group, "example.com");
  await assert.rejects(client.list("gadgets"), NotFound);
  assert.deepEqual(apiserver.requests.slice(0, 5), [
    "list",
    "get x",
    "/prefix/api",
    "/prefix/apis",
    "list",
  ]);
});
