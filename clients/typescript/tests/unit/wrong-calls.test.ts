// Calls that a compiler would refuse. A program in JavaScript has none.

import assert from "node:assert/strict";
import { after, suite, test } from "node:test";
import { Client } from "../../src/client.js";

suite("a wrong call", () => {
  const client = new Client("unix:/none");
  after(() => {
    client.close();
  });

  test("with a misspelt option is refused, and the options are listed", async () => {
    const wrong = { labelSelecter: "app=web" } as object;
    const refused = { name: "TypeError", message: /"labelSelecter".*labelSelector/ };
    assert.throws(() => client.watch("pods", wrong), refused);
    assert.throws(() => client.informer("pods", wrong), refused);
    await assert.rejects(client.list("pods", wrong), refused);
    assert.throws(() => new Client(client.address, { cafile: "ca.crt" } as object), /caFile/);
  });

  test("without an address says what an address looks like", () => {
    const none = undefined as unknown as string;
    assert.throws(() => new Client(none), { name: "InvalidAddress", message: /127.0.0.1:7443/ });
  });
});
