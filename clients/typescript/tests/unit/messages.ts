// Messages of a server, for recorded sequences.

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import * as api from "../../src/gen/kubefan/v1alpha1/watch_pb.js";

const encoder = new TextEncoder();

/** The JSON text of an object. */
export function raw(name: string, value = ""): Uint8Array {
  return encoder.encode(JSON.stringify({ metadata: { name }, value }));
}

/** The fields of an event besides its type, name and version. */
export interface More {
  readonly resume?: string;
  readonly uid?: string;
  readonly value?: string;
  readonly unknown?: boolean;
}

/** An event. */
export function made(
  type: "ADDED" | "MODIFIED" | "DELETED",
  name: string,
  version: string,
  more: More = {},
): api.Event {
  let deleteReason = api.DeleteReason.UNSPECIFIED;
  if (type === "DELETED") {
    deleteReason =
      more.unknown === true
        ? api.DeleteReason.FINAL_STATE_UNKNOWN
        : api.DeleteReason.OBJECT_DELETED;
  }
  return create(api.EventSchema, {
    type: api.EventType[type],
    namespace: "default",
    name,
    uid: more.uid ?? `uid-of-${name}`,
    resourceVersion: version,
    deleteReason,
    object: raw(name, more.value ?? version),
  });
}

function response(
  message: MessageInitShape<typeof api.WatchResponseSchema>["message"],
  resumeVersion = "",
): api.WatchResponse {
  const more = message === undefined ? {} : { message };
  return create(api.WatchResponseSchema, { resumeVersion, ...more });
}

/** A message with an event. */
export function event(
  type: "ADDED" | "MODIFIED" | "DELETED",
  name: string,
  version: string,
  resume = "",
  more: More = {},
): api.WatchResponse {
  return response({ case: "event", value: made(type, name, version, more) }, resume);
}

/** A snapshot starts. */
export function begin(
  resourceVersion: string,
  restartedFrom = "",
  cluster = "c1",
): api.WatchResponse {
  return response({ case: "snapshotBegin", value: { resourceVersion, restartedFrom, cluster } });
}

/** A snapshot is complete. */
export function end(version: string, count = 0): api.WatchResponse {
  return response({ case: "snapshotEnd", value: { objectCount: BigInt(count) } }, version);
}

/** A gap starts. */
export function gapBegin(resourceVersion: string): api.WatchResponse {
  return response({ case: "gapBegin", value: { resourceVersion, reason: "expired" } });
}

/** A gap is complete. */
export function gapEnd(version: string): api.WatchResponse {
  return response({ case: "gapEnd", value: {} }, version);
}

/** A catch-up starts. */
export function catchUpBegin(resourceVersion: string): api.WatchResponse {
  return response({ case: "catchUpBegin", value: { resourceVersion } });
}

/** A catch-up is complete. */
export function catchUpEnd(version: string): api.WatchResponse {
  return response({ case: "catchUpEnd", value: {} }, version);
}

/** A bookmark. */
export function bookmark(version: string): api.WatchResponse {
  return response({ case: "bookmark", value: {} }, version);
}

/** The same message, with the last event of its version. */
export function complete(made: api.WatchResponse): api.WatchResponse {
  return { ...made, versionIsComplete: true };
}

/** A message of a kind that this client does not know. */
export function unknown(version: string): api.WatchResponse {
  return response(undefined, version);
}

/** Objects of a snapshot, in a compressed frame. */
export function chunk(zstd: Uint8Array): api.WatchResponse {
  return response({ case: "snapshotChunk", value: { zstd } });
}

/** A change as a delta to an earlier state. */
export function delta(
  name: string,
  version: string,
  baseCrc32: number,
  zstd: Uint8Array,
): api.WatchResponse {
  const changed = made("MODIFIED", name, version);
  changed.object = new Uint8Array();
  changed.delta = create(api.ObjectDeltaSchema, { baseCrc32, zstd });
  return response({ case: "event", value: changed }, version);
}

/** A short first state: the object `a`, at version 5. */
export function first(): api.WatchResponse[] {
  return [begin("5"), event("ADDED", "a", "1"), end("5", 1)];
}
