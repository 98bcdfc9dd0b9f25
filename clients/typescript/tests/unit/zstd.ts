// A stand-in for zstd, for a Node that has none: frames with zstd's header, and content that is
// stored. It has a checksum, as zstd has, and needs the right dictionary.

import { crc32 } from "../../src/crc32.js";
import type { Zstd } from "../../src/zstd.js";

const HEADER_BYTES = 9;

/** A frame with this content. */
export function frame(content: Uint8Array, dictionary: Uint8Array = new Uint8Array()): Uint8Array {
  const made = Buffer.alloc(HEADER_BYTES + 8 + content.length);
  made.writeUInt32LE(0xfd2fb528, 0);
  // A content size of four bytes, a single segment.
  made.writeUInt8(0xa0, 4);
  made.writeUInt32LE(content.length, 5);
  made.writeUInt32LE(crc32(dictionary), HEADER_BYTES);
  made.writeUInt32LE(crc32(content), HEADER_BYTES + 4);
  made.set(content, HEADER_BYTES + 8);
  return made;
}

/** Decompresses such frames. */
export function fakeZstd(hasDictionaries = true): Zstd {
  return {
    hasDictionaries,
    decompress(made, bytesMax, dictionary = new Uint8Array()) {
      const view = Buffer.from(made);
      const content = view.subarray(HEADER_BYTES + 8);
      if (view.readUInt32LE(HEADER_BYTES) !== crc32(dictionary)) {
        throw new Error("another dictionary");
      }
      if (view.readUInt32LE(HEADER_BYTES + 4) !== crc32(content) || content.length > bytesMax) {
        throw new Error("a wrong checksum");
      }
      return content;
    },
  };
}
