// The events in the body of a watch: one JSON text in each line.

import type { IncomingMessage } from "node:http";
import { failureAt, refusalAt } from "./apiserver-errors.js";
import { KubefanError } from "./errors.js";
import { EventType, type KubeObject } from "./objects.js";
import { fieldsOf } from "./raw-json.js";
import { ErrorReason } from "./reasons.js";

type Decoded =
  { readonly type: EventType; readonly object: KubeObject } | { readonly bookmark: string };

/** The events of a watch, and the versions of its bookmarks. Throws a `KubefanError`. */
export async function* decoderOf(
  server: string,
  response: IncomingMessage,
  objectOf: (text: string) => KubeObject,
): AsyncGenerator<Decoded> {
  try {
    for await (const line of linesOf(response)) {
      const decoded = decode(server, line, objectOf);
      if (decoded !== undefined) {
        yield decoded;
      }
    }
  } catch (error) {
    if (error instanceof KubefanError) {
      throw error;
    }
    const problem = error instanceof Error ? error.message : String(error);
    throw failureAt(server, `the watch broke: ${problem}`);
  } finally {
    response.destroy();
  }
}

async function* linesOf(response: IncomingMessage): AsyncGenerator<string> {
  let parts: Buffer[] = [];
  for await (const chunk of response) {
    let rest = chunk as Buffer;
    for (let at = rest.indexOf(10); at >= 0; at = rest.indexOf(10)) {
      const line = Buffer.concat([...parts, rest.subarray(0, at)]).toString("utf8");
      parts = [];
      rest = rest.subarray(at + 1);
      if (line.trim() !== "") {
        yield line;
      }
    }
    if (rest.length > 0) {
      parts.push(rest);
    }
  }
}

/** Undefined for a type of a newer server. */
function decode(
  server: string,
  line: string,
  objectOf: (text: string) => KubeObject,
): Decoded | undefined {
  const fields = new Map((fieldsOf(line) ?? []).map(({ name, value }) => [name, value]));
  const type = JSON.parse(fields.get("type") ?? '""') as string;
  const content = fields.get("object") ?? "{}";
  if (type === "ERROR") {
    const { code = 500 } = JSON.parse(content) as { code?: number };
    throw refusalAt(server, code, content, ErrorReason.RESOURCE_NOT_FOUND);
  }
  if (type === "BOOKMARK") {
    return { bookmark: objectOf(content).resourceVersion };
  }
  const known = Object.values(EventType).find((one) => one === type);
  return known === undefined ? undefined : { type: known, object: objectOf(content) };
}
