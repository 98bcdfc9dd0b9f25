// A real kubefan with a simulated cluster, on loopback.

import assert from "node:assert/strict";
import { spawn, type ChildProcess } from "node:child_process";
import { createServer } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";

/** The limit of each wait. It is only reached by a test that fails. */
export const WAIT_MS_MAX = 90_000;

/** The kubefan under test. Without `KUBEFAN` the tests are skipped. */
export const program = process.env["KUBEFAN"] ?? "";
/** The reason to skip a test; false if it runs. */
export const skip = program === "" ? "set KUBEFAN to the program" : false;

/** Ports that were free a moment ago, all different. */
export async function freePorts(count: number): Promise<number[]> {
  const probes = Array.from({ length: count }, () => createServer());
  // All are open until the end: a port that is free again could be the next one.
  for (const probe of probes) {
    await new Promise<void>((resolve) => probe.listen(0, "127.0.0.1", resolve));
  }
  const ports = probes.map((probe) => {
    const bound = probe.address();
    assert(typeof bound === "object" && bound !== null);
    return bound.port;
  });
  await Promise.all(probes.map((probe) => new Promise((resolve) => probe.close(resolve))));
  return ports;
}

/** A process with its output. It is killed at the end. */
export class Process implements AsyncDisposable {
  text = "";
  readonly #process: ChildProcess;
  /** It has ended, and all that it wrote is in `text`. */
  #hasClosed = false;

  constructor(command: string, args: string[], options: { cwd?: string; env?: object } = {}) {
    const env = { ...process.env, ...options.env };
    this.#process = spawn(command, args, { ...options, env, stdio: ["pipe", "pipe", "pipe"] });
    this.#process.once("close", () => {
      this.#hasClosed = true;
    });
    for (const stream of [this.#process.stdout, this.#process.stderr]) {
      stream?.on("data", (data: Buffer) => {
        this.text += data.toString();
      });
    }
  }

  get isRunning(): boolean {
    return this.#process.exitCode === null && this.#process.signalCode === null;
  }

  /** Waits until it has written something. */
  async untilWritten(pattern: RegExp): Promise<void> {
    const end = performance.now() + WAIT_MS_MAX;
    while (!pattern.test(this.text)) {
      assert(!this.#hasClosed, `it ended: ${this.text.slice(-2_000)}`);
      assert(performance.now() < end, `waited for ${pattern.source}: ${this.text.slice(-2_000)}`);
      await sleep(50);
    }
  }

  async end(signal: NodeJS.Signals = "SIGKILL"): Promise<void> {
    if (this.isRunning) {
      const ended = new Promise((resolve) => this.#process.once("exit", resolve));
      this.#process.kill(signal);
      await ended;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.end();
  }
}

/** `kubefan demo`: kubefan with a simulated cluster. */
export class Demo implements AsyncDisposable {
  private constructor(
    readonly address: string,
    readonly process: Process,
  ) {}

  static async start(flags: string[] = [], address?: string): Promise<Demo> {
    const [port, adminPort] = await freePorts(2);
    const listen = address ?? `127.0.0.1:${String(port)}`;
    const admin = `127.0.0.1:${String(adminPort)}`;
    const small = ["--objects", "1000", "--subscribers", "1", "--rate", "20"];
    const args = ["demo", "--duration", "0", ...small, ...flags];
    const made = new Process(program, [...args, "--listen", listen, "--admin-listen", admin], {
      env: { RUST_LOG: "info" },
    });
    const end = performance.now() + WAIT_MS_MAX;
    for (;;) {
      assert(made.isRunning, `it ended: ${made.text.slice(-2_000)}`);
      assert(performance.now() < end, `waited for kubefan: ${made.text.slice(-2_000)}`);
      const answer = await fetch(`http://${admin}/readyz`).catch(() => undefined);
      if (answer?.ok === true) {
        return new Demo(listen, made);
      }
      await sleep(50);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.process.end();
  }
}
