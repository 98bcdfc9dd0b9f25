// Calls that a compiler would refuse. A program in JavaScript has none.

import assert from "node:assert/strict";
import { after, suite, test } from "node:test";
import { Client } from "../../src/client.js";
import { Projection, type InformerOptions } from "../../src/options.js";

/** A `TypeError` with this text. */
const refusal = (message: RegExp): { name: string; message: RegExp } => ({
  name: "TypeError",
  message,
});

suite("a wrong call", () => {
  const client = new Client("unix:/none");
  after(() => {
    client.close();
  });

  /** Every method that takes these options must refuse them. */
  const refusesAll = async (wrong: object, message: RegExp): Promise<void> => {
    const refused = refusal(message);
    assert.throws(() => client.watch("pods", wrong), refused);
    assert.throws(() => client.watchItems("pods", wrong), refused);
    assert.throws(() => client.informer("pods", wrong), refused);
    await assert.rejects(client.list("pods", wrong), refused);
  };

  test("with a misspelt option is refused, and the options are listed", async () => {
    await refusesAll({ labelSelecter: "app=web" }, /"labelSelecter".*labelSelector/);
    const noClient = { cafile: "ca.crt" } as object;
    assert.throws(() => new Client(client.address, noClient), /caFile/);
    const noStatus = { timeoutMs: 1 } as object;
    await assert.rejects(client.listResources(noStatus), refusal(/"timeoutMs".*signal/));
  });

  test("with an option that has the name of a property of every object is refused", async () => {
    await refusesAll({ toString: "" }, /"toString" is no option/);
    await refusesAll({ constructor: "" }, /"constructor" is no option/);
  });

  test("with a misspelt part of a projection is refused", async () => {
    const of = (projection: unknown): object => ({ projection });
    await refusesAll(of({ fields: ["a"] }), /"fields" is no option of projection; .*\bpaths\b/);
    await refusesAll(of({ path: ["a"] }), /"path" is no option of projection/);
    await refusesAll(of(["spec"]), /projection is a list; it must be an object/);
    await refusesAll(of("spec"), /projection is "spec"; it must be an object/);
    await refusesAll(of({ paths: "spec" }), /paths is "spec"; it must be a list/);
    const wrong = of({ metadata: true });
    await assert.rejects(client.get("pods", "a", "b", wrong), refusal(/"metadata".*metadataOnly/));
  });

  test("with a projection to no field is refused: it would mean everything", async () => {
    await refusesAll({ projection: { paths: [] } }, /paths is empty.*leave it out/);
    await refusesAll({ projection: Projection.fields() }, /paths is empty/);
  });

  test("with a misspelt part of the backoff is refused", () => {
    const wrong = { backoff: { initial: 5 } } as object;
    const refused = refusal(/"initial" is no option of backoff; .*\binitialMs\b/);
    assert.throws(() => client.watch("pods", wrong), refused);
    assert.throws(() => client.informer("pods", wrong), refused);
  });

  test("with an unknown value is refused, and the values are listed", () => {
    for (const [name, value, allowed] of [
      ["onLag", "drop", /onLag is "drop"; it must be "expire" or "conflate"/],
      ["onExpired", "FAIL", /onExpired is "FAIL"; it must be "fail" or "restart"/],
      ["encoding", "gzip", /encoding is "gzip"; it must be "json", "zstd" or "zstd-delta"/],
      ["encoding", null, /encoding is null; it must be/],
      ["fallback", true, /fallback is true; it must be "paced" or "never"/],
    ] as const) {
      const wrong = { [name]: value } as object;
      assert.throws(() => client.watch("pods", wrong), refusal(allowed));
      assert.throws(() => client.informer("pods", wrong), refusal(allowed));
    }
    client.watch("pods", { onLag: undefined } as object).close();
  });

  test("with options that are none is refused", () => {
    const namespace = "shop" as unknown as InformerOptions;
    const refused = refusal(/informer are "shop"; .*object/);
    assert.throws(() => client.informer("pods", namespace), refused);
    const none = null as unknown as InformerOptions;
    assert.throws(() => client.informer("pods", none), refusal(/informer are null/));
  });

  test("without an address says what an address looks like", () => {
    const none = undefined as unknown as string;
    assert.throws(() => new Client(none), { name: "InvalidAddress", message: /127.0.0.1:7443/ });
  });
});

suite("a wrong call of an informer", () => {
  const client = new Client("unix:/none");
  const informer = client.informer("pods");
  after(() => {
    client.close();
  });

  test("with a misspelt limit is refused: it would wait for ever", async () => {
    const wrong = { timeout: 30 } as object;
    const refused = refusal(/"timeout" is no option of waitForSync; .*timeoutMs/);
    await assert.rejects(informer.waitForSync(wrong), refused);
    const seconds = 30 as unknown as object;
    await assert.rejects(informer.waitForSync(seconds), refusal(/waitForSync are 30; .*object/));
    await assert.rejects(informer.waitUntil("1", wrong), refusal(/"timeout".*waitUntil/));
    await assert.rejects(informer.stop(wrong), refusal(/"timeout".*stop.*timeoutMs/));
    const registration = informer.addEventHandler({ onAdd: () => undefined });
    await assert.rejects(registration.waitForSync(wrong), refused);
  });

  test("with a misspelt function or option of a handler is refused", () => {
    const add = (functions: object, options: object = {}): unknown =>
      informer.addEventHandler(functions, options);
    const onAdd = (): void => undefined;
    const none = refusal(/none of onAdd, onUpdate, onDelete/);
    assert.throws(() => add({}), none);
    assert.throws(() => add({ add: onAdd }), none);
    assert.throws(() => add(onAdd), none);
    assert.throws(() => add({ onAdd, ondelete: onAdd }), refusal(/"ondelete".*onDelete/));
    assert.throws(() => add({ onAdd: 5 }), refusal(/onAdd is 5; it must be a function/));
    assert.throws(() => add({ onAdd }, { backlog: 5 }), refusal(/"backlog".*backlogMax/));
  });

  test("is not one whose handler has fields of its own, or is of a class", () => {
    class Counter {
      seen = 0;

      onAdd(): void {
        this.seen++;
      }
    }
    informer.addEventHandler(new Counter());
    const counts = { seen: 0, onDelete: () => counts.seen++ };
    informer.addEventHandler(counts);
    informer.addEventHandler({ onAdd: undefined, onUpdate: () => undefined } as object);
  });
});
