// One informer of all pods, over kubefan or by @kubernetes/client-node straight.
// tests/integration/languages/cost.rs reads its memory and CPU time from outside, and describes the
// lines that it reads and writes.

import { createInterface } from "node:readline";
import type { V1Pod } from "@kubernetes/client-node";
import { Client, Projection } from "../../src/index.js";

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** Reads a line with this start, and returns the rest. */
async function expect(start: string): Promise<string> {
  const line = await lines.next();
  if (line.done === true || !line.value.startsWith(start)) {
    throw new Error(`expected ${start}`);
  }
  return line.value.slice(start.length);
}

function answer(line: string): void {
  process.stdout.write(`${line}\n`);
}

/** Reports that everything has arrived, collects garbage, and waits. */
async function end(objects: number): Promise<void> {
  answer(`current ${objects.toString()}`);
  await expect("settle");
  globalThis.gc?.();
  answer("settled");
  await lines.next();
}

/** The informer of the official client. */
async function straight(address: string, caFile: string, token: string): Promise<void> {
  // Only here: the other modes do not need it.
  const { CoreV1Api, KubeConfig, makeInformer } = await import("@kubernetes/client-node");
  const config = new KubeConfig();
  config.loadFromOptions({
    clusters: [{ name: "measured", server: address, caFile, skipTLSVerify: false }],
    users: [{ name: "measured", token }],
    contexts: [{ name: "measured", cluster: "measured", user: "measured" }],
    currentContext: "measured",
  });
  const core = config.makeApiClient(CoreV1Api);
  const informer = makeInformer(config, "/api/v1/pods", () => core.listPodForAllNamespaces());
  let [last, wanted, isWanted] = [0, Infinity, (): void => undefined];
  const read = { labels: 0 };
  const use = (pod: V1Pod): void => {
    read.labels += Object.keys(pod.metadata?.labels ?? {}).length;
    last = Math.max(last, Number(pod.metadata?.resourceVersion));
    if (last >= wanted) {
      isWanted();
    }
  };
  informer.on("add", use);
  informer.on("update", use);
  informer.on("error", (error) => {
    console.error(error);
  });
  await informer.start();
  answer(`synced ${informer.list().length.toString()}`);
  wanted = Number(await expect("until "));
  if (last < wanted) {
    await new Promise<void>((resolve) => {
      isWanted = resolve;
    });
  }
  await end(informer.list().length);
}

/** An informer of this package, and a handler that reads what a program would read. */
async function inform(
  address: string,
  caFile: string,
  token: string,
  projection: Projection,
): Promise<void> {
  const client = await Client.connect(address, { caFile, token });
  const informer = client.informer<V1Pod>("pods", { projection });
  const read = { labels: 0 };
  const registration = informer.addEventHandler({
    onAdd: (pod) => {
      read.labels += Object.keys(pod.labels).length;
    },
    onUpdate: (_, pod) => {
      read.labels += Object.keys(pod.labels).length;
    },
  });
  informer.start();
  await registration.waitForSync();
  answer(`synced ${informer.indexer.keys().length.toString()}`);
  await informer.waitUntil(await expect("until "));
  await end(informer.indexer.keys().length);
}

const [mode = "", address = "", caFile = "", token = "", ...paths] = process.argv.slice(2);
answer("ready");
await expect("start");
const dropManagedFields = true;
switch (mode) {
  case "straight-json":
    await straight(address, caFile, token);
    break;
  case "kubefan-json":
    await inform(address, caFile, token, {});
    break;
  case "kubefan-fields":
    await inform(address, caFile, token, { paths, dropManagedFields });
    break;
  case "kubefan-metadata":
    await inform(address, caFile, token, { metadataOnly: true, dropManagedFields });
    break;
  default:
    throw new Error(`${mode} is no mode`);
}
process.exit();
