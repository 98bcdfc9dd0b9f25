// Decodes snapshot chunks and deltas, and keeps the bytes that the next deltas apply to.
//
// The hazard is a base that differs from the server's: it would produce wrong bytes. So each delta
// has a checksum of its base, and after any mismatch the whole base is discarded.

import { fromBinary } from "@bufbuild/protobuf";
import { BinaryReader } from "@bufbuild/protobuf/wire";
import { crc32 } from "./crc32.js";
import {
  EventSchema,
  EventType,
  type Event,
  type ObjectDelta,
} from "./gen/kubefan/v1alpha1/watch_pb.js";
import { frameContentSize, type Zstd } from "./zstd.js";

/** The largest content of a snapshot chunk, in bytes. */
const CHUNK_BYTES_MAX = 64 * 2 ** 20;
/** The largest object that a delta may produce, in bytes. */
const OBJECT_BYTES_MAX = 64 * 2 ** 20;
/** Approximate memory of an entry besides the object's bytes and its key, in bytes. */
const ENTRY_BYTES = 200;

/** A message cannot be decoded. */
export class DeltaError extends Error {}

/** A delta does not apply to the bytes that the client has. */
export class WrongBaseError extends DeltaError {}

/** The base was dropped because of its memory limit, so no delta can be applied. */
export class OverLimitError extends DeltaError {}

function decompress(
  zstd: Zstd | undefined,
  frame: Uint8Array,
  bytesMax: number,
  dictionary?: Uint8Array,
): Uint8Array {
  if (zstd === undefined) {
    throw new DeltaError("a compressed message arrived, but none was asked for");
  }
  const size = frameContentSize(frame);
  if (size === undefined || size > bytesMax) {
    throw new DeltaError(
      `a compressed frame of ${String(size ?? "unknown")} bytes; the limit is ${String(bytesMax)}`,
    );
  }
  let content: Uint8Array;
  try {
    content = zstd.decompress(frame, Math.max(size, 1), dictionary);
  } catch (error) {
    const problem = error instanceof Error ? error.message : String(error);
    throw new DeltaError(`a broken compressed frame: ${problem}`);
  }
  if (content.length !== size) {
    throw new DeltaError("a broken compressed frame: it is cut off, or more follows it");
  }
  return content;
}

/** The events of a `SnapshotChunk`. Throws `DeltaError`. */
export function decodeChunk(zstd: Zstd | undefined, chunk: Uint8Array): Event[] {
  const reader = new BinaryReader(decompress(zstd, chunk, CHUNK_BYTES_MAX));
  const events: Event[] = [];
  try {
    while (reader.pos < reader.len) {
      events.push(fromBinary(EventSchema, reader.bytes()));
    }
  } catch (error) {
    const problem = error instanceof Error ? error.message : String(error);
    throw new DeltaError(`a broken event in a chunk: ${problem}`);
  }
  return events;
}

/** Applies a delta to the previous bytes of the object. Throws `DeltaError`. */
export function decodeDelta(
  zstd: Zstd | undefined,
  held: Uint8Array,
  delta: ObjectDelta,
): Uint8Array {
  if (crc32(held) !== delta.baseCrc32) {
    throw new WrongBaseError("a delta does not fit the previous state of its object");
  }
  return decompress(zstd, delta.zstd, OBJECT_BYTES_MAX, held);
}

/** The bytes of every object of a watch, up to a limit in bytes. */
export class DeltaBase {
  readonly #zstd: Zstd | undefined;
  readonly #bytesMax: number;
  readonly #objects = new Map<string, Uint8Array>();
  #bytes = 0;
  #overLimit = false;
  #complete = false;

  constructor(zstd: Zstd | undefined, bytesMax: number) {
    this.#zstd = zstd;
    this.#bytesMax = bytesMax;
  }

  /** Whether every object of the watch is here. */
  get complete(): boolean {
    return this.#complete;
  }

  /** Discards all objects, as at the start of a snapshot. */
  clear(): void {
    this.#objects.clear();
    this.#bytes = 0;
    this.#overLimit = false;
    this.#complete = false;
  }

  /** Every object has been received: the base is complete, unless it exceeded the limit. */
  endSnapshot(): void {
    this.#complete = !this.#overLimit;
  }

  /** The whole object of an event, which becomes the next base. Throws `DeltaError`. */
  resolve(event: Event): Uint8Array {
    const key = `${event.namespace}/${event.name}`;
    let raw: Uint8Array;
    if (event.delta === undefined) {
      // A copy: the event's bytes are a part of the whole message, which would stay in memory.
      raw = new Uint8Array(event.object);
    } else {
      if (this.#overLimit) {
        throw new OverLimitError(
          `the objects exceed ${String(this.#bytesMax)} bytes, the limit of deltaBaseBytesMax; ` +
            "continuing without deltas",
        );
      }
      const held = this.#objects.get(key);
      if (held === undefined) {
        throw new WrongBaseError("a delta arrived for an object without a previous state");
      }
      raw = decodeDelta(this.#zstd, held, event.delta);
    }
    this.#store(key, event.type === EventType.DELETED ? undefined : raw);
    return raw;
  }

  #store(key: string, raw: Uint8Array | undefined): void {
    const entryBytes = key.length + ENTRY_BYTES;
    const before = this.#objects.get(key);
    if (before !== undefined) {
      this.#objects.delete(key);
      this.#bytes -= before.length + entryBytes;
    }
    if (raw === undefined || this.#overLimit) {
      return;
    }
    this.#bytes += raw.length + entryBytes;
    this.#objects.set(key, raw);
    if (this.#bytes > this.#bytesMax) {
      this.clear();
      this.#overLimit = true;
    }
  }
}
