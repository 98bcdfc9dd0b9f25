// Connections with certificates, against a server of the test's own.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { copyFileSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, suite, test } from "node:test";
import { Client } from "../../src/client.js";
import { Unreachable } from "../../src/errors.js";
import { event, first } from "./messages.js";
import { FAST, Recorder } from "./recorder.js";
import { Server, sends } from "./server.js";

const directory = mkdtempSync(join(tmpdir(), "kubefan-"));
after(() => {
  rmSync(directory, { recursive: true });
});

/** A certificate that signs itself, and its key. */
interface Made {
  readonly certificate: string;
  readonly key: string;
  /** The settings of a server that has it, and trusts only it. */
  readonly server: { readonly cert: Buffer; readonly key: Buffer; readonly ca: Buffer };
}

function make(name: string): Made {
  const certificate = join(directory, `${name}.pem`);
  const key = join(directory, `${name}-key.pem`);
  execFileSync(
    "openssl",
    [
      ...["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"],
      ...["-days", "2", "-subj", `/CN=${name}`, "-addext", "subjectAltName=DNS:kubefan.test"],
      ...["-keyout", key, "-out", certificate],
    ],
    { stdio: "ignore" },
  );
  const cert = readFileSync(certificate);
  return { certificate, key, server: { cert, key: readFileSync(key), ca: cert } };
}

suite("TLS", () => {
  const made = make("first");
  const mutual = { requestCert: true, rejectUnauthorized: true };

  test("carries a token, checks the name, and sends a client certificate", async () => {
    const secure = { ...made.server, ...mutual };
    await using server = await Server.start([sends(first())], { tls: secure });
    const options = {
      caFile: made.certificate,
      token: "secret",
      clientCertificateFile: made.certificate,
      clientKeyFile: made.key,
    };
    await using client = await Client.connect(server.address, {
      ...options,
      serverName: "kubefan.test",
    });
    const recorder = new Recorder(client.watch("pods"));
    await recorder.until("the state", "ADDED a");
    assert.deepEqual(server.tokens, ["Bearer secret", "Bearer secret"]);
    await assert.rejects(Client.connect(server.address, options), (error) => {
      assert(error instanceof Unreachable);
      assert.match(error.message, /127\.0\.0\.1/);
      return true;
    });
  });

  test("needs a CA that is trusted, and a server that speaks it", async () => {
    await using server = await Server.start([], { tls: made.server });
    await assert.rejects(Client.connect(server.address), /caFile must contain the CA/);
    await using plain = await Server.start();
    const address = `https://${plain.address}`;
    await assert.rejects(Client.connect(address), (error) => error instanceof Unreachable);
  });

  test("takes a renewed CA and client certificate for the next connection", async () => {
    const renewed = make("second");
    const caFile = join(directory, "ca.crt");
    const clientCertificateFile = join(directory, "tls.crt");
    const clientKeyFile = join(directory, "tls.key");
    copyFileSync(made.certificate, caFile);
    copyFileSync(made.certificate, clientCertificateFile);
    copyFileSync(made.key, clientKeyFile);
    await using server = await Server.start(
      [sends(first()), sends([event("MODIFIED", "a", "6")]), sends([event("MODIFIED", "a", "7")])],
      { tls: { ...made.server, ...mutual } },
    );
    const options = { caFile, clientCertificateFile, clientKeyFile, serverName: "kubefan.test" };
    await using client = new Client(server.address, options);
    const recorder = new Recorder(client.watch("pods", { backoff: FAST }));
    await recorder.until("the state", "ADDED a");

    // Half of a renewal: the key does not belong to the certificate. Those before stay in use.
    copyFileSync(renewed.key, clientKeyFile);
    server.cut();
    await recorder.until("the first change", "ADDED a", "MODIFIED a");

    copyFileSync(renewed.certificate, caFile);
    copyFileSync(renewed.certificate, clientCertificateFile);
    server.renew({ ...renewed.server, ...mutual });
    server.cut();
    await recorder.until("the second change", "ADDED a", "MODIFIED a", "MODIFIED a");
  });

  test("is closed when a dying connection has just refused a call", async () => {
    const secure = { ...made.server, ...mutual };
    const change = event("MODIFIED", "a", "6");
    await using server = await Server.start([sends(first()), sends([change])], { tls: secure });
    const client = new Client(server.address, {
      caFile: made.certificate,
      clientCertificateFile: made.certificate,
      clientKeyFile: made.key,
      serverName: "kubefan.test",
    });
    const recorder = new Recorder(client.watch("pods", { backoff: FAST }));
    await recorder.until("the state", "ADDED a");
    server.cut();
    await recorder.until("the change", "ADDED a", "MODIFIED a");
    await client.listResources();
    server.cut();
    // The refusal comes with a GOAWAY, while the watch has a stream on the same connection.
    await assert.rejects(client.listResources(), Unreachable);
    client.close();
  });
});
