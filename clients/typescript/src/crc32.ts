// CRC-32 (IEEE 802.3), as in zlib. Node's own, `zlib.crc32`, exists since 20.15 and 22.2.

import * as zlib from "node:zlib";

const table = new Uint32Array(256).map((_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) {
    value = (value & 1) === 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  }
  return value;
});

/** The checksum computed here, for a Node without its own. */
export function tableCrc32(bytes: Uint8Array): number {
  let value = 0xffffffff;
  for (const byte of bytes) {
    value = (table[(value ^ byte) & 0xff] ?? 0) ^ (value >>> 8);
  }
  return (value ^ 0xffffffff) >>> 0;
}

const own = (zlib as { crc32?: (bytes: Uint8Array) => number }).crc32;

/** The checksum of some bytes, as an unsigned number. */
export const crc32: (bytes: Uint8Array) => number = own ?? tableCrc32;
