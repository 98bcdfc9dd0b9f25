// Decompression, as far as this Node can do it. Node has zstd since 22.15 and 23.8, and takes a
// dictionary since 22.19 and 24.6. A Node that has no dictionaries silently ignores the option, so
// a small frame is tried.

import * as zlib from "node:zlib";

/** Decompresses zstd frames. */
export interface Zstd {
  /** Whether frames that were made with a dictionary can be decompressed. */
  readonly hasDictionaries: boolean;
  /** The content of one frame, with at most `bytesMax` bytes. Throws if the frame is broken. */
  decompress(frame: Uint8Array, bytesMax: number, dictionary?: Uint8Array): Uint8Array;
}

type Decompress = (
  frame: Uint8Array,
  options: { maxOutputLength: number; dictionary?: Uint8Array },
) => Uint8Array;

/** The probe's text and its dictionary are the same. */
const PROBE = new TextEncoder().encode('{"kubefan":"a dictionary of raw content, for a probe"}');
const PROBE_FRAME = Buffer.from("KLUv/SQ2RQAACHsBAMqnEgIjxcRu", "base64");

let found: Zstd | null | undefined;

/** The zstd of this Node; undefined if it has none. */
export function nodeZstd(): Zstd | undefined {
  found ??= probe();
  return found ?? undefined;
}

function probe(): Zstd | null {
  const module: Record<string, unknown> = { ...zlib };
  const decompress = module["zstdDecompressSync"];
  if (typeof decompress !== "function") {
    return null;
  }
  const call: Zstd["decompress"] = (frame, bytesMax, dictionary) => {
    // An empty dictionary is none, also for the server that compressed with it.
    const prefix = dictionary === undefined || dictionary.length === 0 ? {} : { dictionary };
    return (decompress as Decompress)(frame, { maxOutputLength: bytesMax, ...prefix });
  };
  let hasDictionaries = false;
  try {
    hasDictionaries = Buffer.compare(call(PROBE_FRAME, 1 << 10, PROBE), PROBE) === 0;
  } catch {
    // This Node has zstd without dictionaries.
  }
  return { hasDictionaries, decompress: call };
}

/**
 * The size of a frame's content, from its header (RFC 8878, section 3.1.1.1). Undefined if this is
 * no frame, or if it does not say. A limit is checked before memory is taken.
 */
export function frameContentSize(frame: Uint8Array): number | undefined {
  const view = new DataView(frame.buffer, frame.byteOffset, frame.byteLength);
  if (frame.length < 6 || view.getUint32(0, true) !== 0xfd2fb528) {
    return undefined;
  }
  const descriptor = view.getUint8(4);
  const sizeFlag = descriptor >> 6;
  const isSingleSegment = (descriptor & 0x20) !== 0;
  const dictionaryIdBytes = [0, 1, 2, 4][descriptor & 3] ?? 0;
  const at = 5 + (isSingleSegment ? 0 : 1) + dictionaryIdBytes;
  const sizeBytes = sizeFlag === 0 ? (isSingleSegment ? 1 : 0) : 1 << sizeFlag;
  if (sizeBytes === 0 || frame.length < at + sizeBytes) {
    return undefined;
  }
  switch (sizeBytes) {
    case 1:
      return view.getUint8(at);
    case 2:
      return view.getUint16(at, true) + 256;
    case 4:
      return view.getUint32(at, true);
    default:
      return Number(view.getBigUint64(at, true));
  }
}
