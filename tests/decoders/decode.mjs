// Lists and watches ConfigMaps with fetch, and with node:http and node:zlib, all at the same time,
// and prints each report as a line of JSON.
//
//     node decode.mjs TASK
//
// TASK is JSON: the CA's file, a token, and the reads. fetch takes its CA from NODE_EXTRA_CA_CERTS.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { get } from "node:https";
import { pipeline } from "node:stream/promises";
import { createGunzip } from "node:zlib";

const task = JSON.parse(process.argv[2]);
const headers = { authorization: `Bearer ${task.token}` };

/** fetch asks for gzip by default. */
async function overFetch(read) {
  const response = await fetch(read.url, { headers });
  await reportLines(read, response.body);
}

/** node:http asks for nothing by default, and its users decompress. */
async function overHttp(read) {
  const options = { headers: { ...headers, "accept-encoding": "gzip" }, ca: readFileSync(task.ca_file) };
  const response = await new Promise((resolve, reject) => get(read.url, options, resolve).on("error", reject));
  const decoders = response.headers["content-encoding"] === "gzip" ? [createGunzip()] : [];
  await pipeline(response, ...decoders, (body) => reportLines(read, body));
}

async function reportLines(read, body) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of body) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) reportLine(read, line);
  }
  if (rest !== "") reportLine(read, rest);
}

function reportLine(read, line) {
  const value = JSON.parse(line);
  if (!read.is_list) return reportObject(read, value.type, value.object);
  for (const item of value.items) reportObject(read, "ITEM", item);
}

function reportObject(read, type, { metadata, data }) {
  const digest = createHash("sha256").update(data.payload).digest("hex");
  report(read, { type, name: metadata.name, version: metadata.resourceVersion, digest });
}

function report(read, value) {
  console.log(JSON.stringify({ decoder: read.decoder, read: read.read, ...value }));
}

const decoders = { "Node fetch": overFetch, "Node http": overHttp };
await Promise.all(task.reads.map(async (read) => {
  try {
    await decoders[read.decoder](read);
    report(read, { end: "clean" });
  } catch (error) {
    report(read, { end: "error", error: [error, error.cause].filter(Boolean).join("; ") });
  }
}));
