// The parts without a server: delays, tokens, addresses, objects, checksums.

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, suite, test } from "node:test";
import { inspect } from "node:util";
import { Backoff } from "../../src/backoff.js";
import { Client } from "../../src/client.js";
import { crc32, tableCrc32 } from "../../src/crc32.js";
import { endpointOf } from "../../src/endpoint.js";
import { InvalidAddress } from "../../src/errors.js";
import { inClusterOptions } from "../../src/in-cluster.js";
import { DECODED_MAX, KubeObject } from "../../src/objects.js";
import { Store } from "../../src/store.js";
import { READ_INTERVAL_MS, Token } from "../../src/token.js";
import { VERSION } from "../../src/version.js";

const bytes = (text: string): Uint8Array => new TextEncoder().encode(text);
const directory = mkdtempSync(join(tmpdir(), "kubefan-"));
after(() => {
  rmSync(directory, { recursive: true });
});

suite("the backoff", () => {
  test("doubles from 0.8 s to 30 s, with up to as much jitter", () => {
    for (const [random, factor] of [
      [0, 1],
      [0.5, 1.5],
      [1, 2],
    ] as const) {
      const backoff = new Backoff({}, () => random);
      let now = 0;
      const delays = Array.from({ length: 8 }, () => {
        const delay = backoff.nextDelay(now);
        now += delay;
        return delay / factor;
      });
      assert.deepEqual(delays, [800, 1_600, 3_200, 6_400, 12_800, 25_600, 30_000, 30_000]);
    }
  });

  test("starts again after two healthy minutes, which start when the delay ends", () => {
    const backoff = new Backoff({}, () => 0);
    assert.equal(backoff.nextDelay(0), 800);
    assert.equal(backoff.nextDelay(800), 1_600);
    assert.equal(backoff.nextDelay(2_400 + 119_999), 3_200);
    assert.equal(backoff.nextDelay(2_400 + 119_999 + 3_200 + 120_000), 800);
  });

  test("is never shorter than the server asks for, and counts that time", () => {
    const backoff = new Backoff({}, () => 0);
    assert.equal(backoff.nextDelay(0, 200_000), 200_000);
    assert.equal(backoff.nextDelay(200_000, 1), 1_600);
  });
});

suite("a token", () => {
  const file = join(directory, "token");

  test("from a file is read again after ten seconds", () => {
    let now = 0;
    writeFileSync(file, " first\n");
    const token = new Token(undefined, file, () => now);
    assert.equal(token.header(), "Bearer first");
    writeFileSync(file, "second");
    now = READ_INTERVAL_MS - 1;
    assert.equal(token.header(), "Bearer first");
    now = READ_INTERVAL_MS;
    assert.equal(token.header(), "Bearer second");
  });

  test("from a file is read at once when it was refused or has ended", () => {
    writeFileSync(file, "first");
    const token = new Token("ignored", file, () => 0);
    const sent = token.header();
    assert(!token.replacement(sent), "it is the same");
    writeFileSync(file, "second");
    assert(token.replacement(sent));
    writeFileSync(file, "third");
    token.expire("Bearer another");
    assert.equal(token.header(), "Bearer second");
    token.expire("Bearer second");
    assert.equal(token.header(), "Bearer third");
  });

  test("stays in use while its file cannot be read", () => {
    const gone = join(directory, "gone");
    assert.throws(() => new Token(undefined, gone).header());
    writeFileSync(gone, "kept");
    let now = 0;
    const token = new Token(undefined, gone, () => now);
    token.header();
    rmSync(gone);
    now = READ_INTERVAL_MS;
    assert.equal(token.header(), "Bearer kept");
  });

  test("is in no error and in no log", () => {
    writeFileSync(file, "se\u00e9cret");
    for (const make of [
      (): unknown => new Token("se\u00e9cret", undefined),
      (): unknown => new Token(undefined, file).header(),
    ]) {
      assert.throws(make, (error: Error) => !inspect(error).includes("cret\n"));
      assert.throws(make, /characters that a header cannot contain/);
    }
    assert.throws(() => new Token(" ", undefined), /empty/);
    const client = new Client("unix:/none", { token: "secret" });
    assert(!inspect(client, { depth: 9, showHidden: true }).includes("secret"));
    client.close();
  });
});

suite("an address", () => {
  test("has a host and a port, or a path", () => {
    const place = (address: string): unknown => endpointOf(address, {}).place;
    const local = { host: "127.0.0.1", port: 7443 };
    assert.deepEqual(place("127.0.0.1:7443"), local);
    assert.deepEqual(place("http://127.0.0.1:7443/"), local);
    assert.deepEqual(place("dns:kubefan:1"), { host: "kubefan", port: 1 });
    assert.deepEqual(place("dns:///kubefan:1"), { host: "kubefan", port: 1 });
    assert.deepEqual(place("https://[::1]:443"), { host: "::1", port: 443 });
    assert.deepEqual(place("unix:/run/kubefan.sock"), { path: "/run/kubefan.sock" });
    assert.deepEqual(place("unix:///run/kubefan.sock"), { path: "/run/kubefan.sock" });
    assert.equal(endpointOf("[::1]:443", {}).origin, "http://[::1]:443");
  });

  test("of another form is refused, with an example", () => {
    for (const wrong of ["", "kubefan", "h:0", "h:65536", "h:1/path", "ftp://h:1", "a b:1", "unix:"]) {
      assert.throws(() => endpointOf(wrong, {}), /write it like 127\.0\.0\.1:7443/, wrong);
    }
  });

  test("without TLS gets no token, and no certificate", () => {
    for (const address of ["h:1", "http://h:1", "dns:h:1"]) {
      assert.throws(
        () => endpointOf(address, { token: "secret" }),
        (error) =>
          error instanceof InvalidAddress &&
          error.message.includes("https://h:1") &&
          !error.message.includes("secret"),
      );
      assert.throws(() => endpointOf(address, { tokenFile: "/none" }), /only over TLS/);
      assert.throws(() => endpointOf(address, { caFile: "/none" }), /need an https/);
      assert.throws(() => endpointOf(address, { serverName: "k" }), /need an https/);
    }
    assert(endpointOf("https://h:1", { token: "secret" }).token.isSet);
    assert(endpointOf("unix:/socket", { token: "secret" }).token.isSet);
  });

  test("names the file that is wrong", () => {
    const file = join(directory, "not.pem");
    writeFileSync(file, "nonsense");
    const https = "https://h:1";
    assert.throws(() => endpointOf(https, { caFile: "/none.pem" }), /none\.pem/);
    assert.throws(() => endpointOf(https, { caFile: file }), /contains no PEM certificate/);
    assert.throws(() => endpointOf(https, { clientKeyFile: file }), /needs both/);
  });

  test("in a cluster has the pod's token and kubefan's CA", () => {
    const options = inClusterOptions({ caFile: "/other" });
    assert.equal(options.caFile, "/other");
    assert.match(options.tokenFile ?? "", /serviceaccount\/token$/);
    assert.throws(() => Client.inCluster(), InvalidAddress, "there is no CA file here");
  });
});

suite("an object", () => {
  const object = (raw: string, version = "1"): KubeObject =>
    new KubeObject("shop", "web", "u", version, bytes(raw));

  test("decodes its text when it is read", () => {
    const made = object('{"metadata":{"labels":{"app":"é"}},"n":1}');
    assert.deepEqual([made.key, made.namespace, made.name], ["shop/web", "shop", "web"]);
    assert.deepEqual(made.labels, { app: "é" });
    assert.equal(made.value, made.value);
    assert.notEqual(made.toJSON(), made.value);
    assert.deepEqual(object("").value, {});
    const cluster = new KubeObject("", "node-1", "u", "1", bytes("{}"));
    assert.deepEqual([cluster.key, cluster.namespace, cluster.name], ["node-1", "", "node-1"]);
    assert.deepEqual(cluster.labels, {});
  });

  test("is equal to one with the same text and version", () => {
    assert(object('{"a":1}').equals(object('{"a":1}')));
    assert(!object('{"a":1}').equals(object('{"a":2}')));
    assert(!object('{"a":1}').equals(object('{"a":1}', "2")));
  });

  test("does not keep its decoded form for ever", () => {
    const made = object('{"a":1}');
    const value = made.value;
    for (let count = 0; count < DECODED_MAX; count++) {
      assert.deepEqual(object(`{"a":${String(count)}}`).value, { a: count });
    }
    assert.notEqual(made.value, value);
    assert.deepEqual(made.value, value);
  });
});

suite("a store", () => {
  const pod = (name: string, app: string, node: string): KubeObject =>
    new KubeObject(
      "shop",
      name,
      name,
      "1",
      bytes(JSON.stringify({ metadata: { labels: { app } }, spec: { nodeName: node } })),
    );

  test("has indexes that follow its changes", () => {
    const errors: unknown[] = [];
    const store = new Store((error) => errors.push(error));
    store.write([["shop/a", pod("a", "web", "n1")]]);
    store.addIndex("node", (made) => [(made.value["spec"] as { nodeName: string }).nodeName]);
    store.addLabelIndex("app");
    store.write([["shop/b", pod("b", "web", "n1")]]);
    const names = (found: KubeObject[]): string[] => found.map((one) => one.name);
    assert.deepEqual(names(store.byIndex("node", "n1")), ["a", "b"]);
    assert.deepEqual(names(store.byLabel("app", "web")), ["a", "b"]);
    assert.deepEqual(names(store.byNamespace("shop")), ["a", "b"]);
    store.write([
      ["shop/a", undefined],
      ["shop/b", pod("b", "db", "n2")],
    ]);
    assert.deepEqual(store.indexValues("node"), ["n2"]);
    assert.deepEqual(names(store.byLabel("app", "web")), []);
    assert.deepEqual([store.size, store.has("shop/a"), store.keys()], [1, false, ["shop/b"]]);
    assert.throws(() => {
      store.addLabelIndex("app");
    }, /already/);
    assert.throws(() => store.byIndex("none", "x"), /no index/);
    store.addIndex("broken", () => {
      throw new Error("bad function");
    });
    assert.deepEqual([errors.length, store.indexValues("broken")], [1, []]);
  });
});

test("the checksum is that of zlib", () => {
  for (const one of [crc32, tableCrc32]) {
    assert.equal(one(bytes("123456789")), 0xcbf43926);
    assert.equal(one(new Uint8Array()), 0);
  }
});

test("the version is that of package.json and of its lock file", () => {
  for (const file of ["package.json", "package-lock.json"]) {
    const { version } = JSON.parse(readFileSync(file, "utf8")) as { version: string };
    assert.equal(version, VERSION, file);
  }
});
