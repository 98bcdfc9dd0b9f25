"""Decodes deltas and snapshot chunks as watch.proto specifies, and checks every test vector.

decode.py ../../proto/kubefan/v1alpha1/testdata

python -m pip install -r requirements.txt
python -m grpc_tools.protoc -I../../proto --python_out=. --grpc_python_out=. kubefan/v1alpha1/watch.proto
"""
import io
import json
import pathlib
import sys
import zlib

import zstandard
from google.protobuf import message, proto
from kubefan.v1alpha1 import watch_pb2 as api

CONTENT_BYTES_MAX = 64 << 20


class WrongBase(Exception):
    pass


def decompress(frame, **options):
    if zstandard.frame_content_size(frame) > CONTENT_BYTES_MAX:
        raise zstandard.ZstdError("too large")
    return zstandard.ZstdDecompressor(**options).decompress(frame, allow_extra_data=False)


def decode_object(held, delta):
    """Applies a delta to the bytes that the client retained. After an error they cannot be trusted."""
    if zlib.crc32(held) != delta.base_crc32:
        raise WrongBase
    base = zstandard.ZstdCompressionDict(held, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return decompress(delta.zstd, dict_data=base)


def decode_events(chunk):
    """Decodes a snapshot chunk."""
    content = io.BytesIO(decompress(chunk))
    while (event := proto.parse_length_prefixed(api.Event, content)) is not None:
        yield event


def main(directory):
    def tried(decode, *arguments):
        try:
            return decode(*arguments), ""
        except WrongBase:
            return None, "wrong_base"
        except (zstandard.ZstdError, message.DecodeError):
            return None, "broken_frame"

    read = lambda file: (directory / file).read_bytes()
    index = json.loads(read("index.json"))
    for case in index["deltas"]:
        delta = api.ObjectDelta.FromString(read(case["delta"]))
        made, error = tried(decode_object, read(case["held"]), delta)
        assert error == case["error"], (case["name"], error)
        assert error or made == read(case["object"]), case["name"]
    fields = ("namespace", "name", "resource_version")
    for case in index["chunks"]:
        made, error = tried(lambda chunk: list(decode_events(chunk)), read(case["chunk"]))
        assert error == case["error"], (case["name"], error)
        made = [{"object": event.object.decode(), **{field: getattr(event, field) for field in fields}} for event in made or []]
        assert made == case["events"], case["name"]
    print("decoded", len(index["deltas"]), "deltas and", len(index["chunks"]), "chunks")


main(pathlib.Path(sys.argv[1]))
