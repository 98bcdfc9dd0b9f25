// Every test vector of the contract decodes as it says, with this Node's own zstd.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { suite, test } from "node:test";
import { fromBinary } from "@bufbuild/protobuf";
import { DeltaError, WrongBaseError, decodeChunk, decodeDelta } from "../../src/delta.js";
import { ObjectDeltaSchema } from "../../src/gen/kubefan/v1alpha1/watch_pb.js";
import { frameContentSize, nodeZstd } from "../../src/zstd.js";

// The tests run in clients/typescript.
const directory = join(process.cwd(), "../../proto/kubefan/v1alpha1/testdata");
const read = (name: string): Uint8Array => readFileSync(join(directory, name));

interface Index {
  deltas: { name: string; held: string; delta: string; object: string; error: string }[];
  chunks: {
    name: string;
    chunk: string;
    error: string;
    events: { namespace: string; name: string; resource_version: string; object: string }[];
  }[];
}
const index = JSON.parse(readFileSync(join(directory, "index.json"), "utf8")) as Index;
const zstd = nodeZstd();

suite("test vectors of the contract", () => {
  for (const one of index.deltas) {
    const skip =
      zstd?.hasDictionaries === true || one.error === "wrong_base"
        ? false
        : "this Node has no zstd with dictionaries";
    test(`delta ${one.name}`, { skip }, () => {
      const delta = fromBinary(ObjectDeltaSchema, read(one.delta));
      const decode = (): Uint8Array => decodeDelta(zstd, read(one.held), delta);
      if (one.error === "") {
        assert.deepEqual(Buffer.from(decode()), read(one.object));
      } else {
        assert.throws(decode, one.error === "wrong_base" ? WrongBaseError : DeltaError);
      }
    });
  }

  for (const one of index.chunks) {
    test(`chunk ${one.name}`, { skip: zstd === undefined && "this Node has no zstd" }, () => {
      const decode = (): unknown[] =>
        decodeChunk(zstd, read(one.chunk)).map((event) => ({
          namespace: event.namespace,
          name: event.name,
          resource_version: event.resourceVersion,
          object: Buffer.from(event.object).toString(),
        }));
      if (one.error === "") {
        assert.deepEqual(decode(), one.events);
      } else {
        assert.throws(decode, DeltaError);
      }
    });
  }

  test("the sizes in the headers of frames are read", () => {
    for (const one of index.deltas.filter((made) => made.error === "")) {
      const delta = fromBinary(ObjectDeltaSchema, read(one.delta));
      assert.equal(frameContentSize(delta.zstd), read(one.object).length);
    }
    assert.equal(frameContentSize(new Uint8Array()), undefined);
    assert.equal(frameContentSize(Buffer.from("nonsense")), undefined);
  });
});
