// An apiserver that answers by the script of a test.

import * as http from "node:http";
import { Apiserver } from "../../src/apiserver.js";

/**
 * The answer to a watch: its events, the status of a refusal, none at all, one that ends at once,
 * or a delay of an hour.
 */
export type Answer = readonly object[] | number | "hang" | "end" | "later";

/** An object, as a list has it. */
export function pod(name: string, resourceVersion: string): object {
  return { metadata: { namespace: "default", name, uid: `uid-of-${name}`, resourceVersion } };
}

/** An event of a watch. */
export function line(type: string, name: string, version: string): object {
  return { type, object: { kind: "Pod", apiVersion: "v1", ...pod(name, version) } };
}

/** A list. */
export function listed(resourceVersion: string, ...names: string[]): object {
  const items = names.map((name) => pod(name, "1"));
  return { kind: "PodList", apiVersion: "v1", metadata: { resourceVersion }, items };
}

/** Serves lists and watches, each by the next entry. A watch without an entry stays silent. */
export class FakeApiserver {
  /** The requests: `list`, `watch 5`, `get a`, and paths of discovery. */
  readonly requests: string[] = [];
  readonly client: Apiserver;
  readonly #server: http.Server;

  private constructor(server: http.Server, port: number) {
    this.#server = server;
    this.client = new Apiserver(`http://127.0.0.1:${String(port)}/prefix`);
  }

  /** Starts an apiserver. */
  static async start(
    lists: readonly object[] = [],
    watches: readonly Answer[] = [],
    documents: Readonly<Record<string, object>> = {},
  ): Promise<FakeApiserver> {
    const [nextLists, nextWatches] = [[...lists], [...watches]];
    const made: { fake?: FakeApiserver } = {};
    const server = http.createServer((request, response) => {
      const url = new URL(request.url ?? "", "http://localhost");
      const requests = made.fake?.requests ?? [];
      const document = documents[url.pathname];
      if (document !== undefined) {
        requests.push(url.pathname);
        response.end(JSON.stringify(document));
      } else if (url.searchParams.has("watch")) {
        requests.push(`watch ${url.searchParams.get("resourceVersion") ?? ""}`);
        answerWatch(response, nextWatches.shift() ?? []);
      } else if (url.pathname.endsWith("s")) {
        requests.push("list");
        response.end(JSON.stringify(nextLists.shift()));
      } else {
        const name = url.pathname.split("/").at(-1) ?? "";
        requests.push(`get ${name}`);
        response.end(JSON.stringify({ kind: "Pod", apiVersion: "v1", ...pod(name, "3") }));
      }
    });
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    const bound = server.address();
    made.fake = new FakeApiserver(server, typeof bound === "object" ? (bound?.port ?? 0) : 0);
    return made.fake;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const closed = new Promise((resolve) => this.#server.close(resolve));
    this.#server.closeAllConnections();
    await closed;
  }
}

function answerWatch(response: http.ServerResponse, answer: Answer): void {
  if (answer === "hang") {
    return;
  }
  if (answer === "end") {
    response.end();
    return;
  }
  if (answer === "later") {
    response.writeHead(503, { "Retry-After": "3600" });
    response.end("{}");
    return;
  }
  if (typeof answer === "number") {
    response.statusCode = answer;
    response.end(JSON.stringify({ code: answer, message: "refused" }));
    return;
  }
  response.writeHead(200);
  response.flushHeaders();
  for (const item of answer) {
    response.write(`${JSON.stringify(item)}\n`);
  }
}
