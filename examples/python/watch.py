"""Lists pods, then watches them. Resumes after a break without losing a change.

watch.py 127.0.0.1:7443

python -m pip install -r requirements.txt
python -m grpc_tools.protoc -I../../proto --python_out=. --grpc_python_out=. kubefan/v1alpha1/watch.proto
"""
import sys
import time

import grpc
from kubefan.v1alpha1 import watch_pb2 as api, watch_pb2_grpc


def show(what, item):
    print(what, f"{item.namespace}/{item.name}", item.resource_version, flush=True)


stub = watch_pb2_grpc.WatchServiceStub(grpc.insecure_channel(sys.argv[1], [("grpc.max_receive_message_length", 64 << 20)]))
target = api.Target(resource="pods")
version = ""
while True:
    try:
        if not version:
            for chunk in stub.List(api.ListRequest(target=target)):
                for item in chunk.objects:
                    show("LISTED", item)
            version = chunk.resource_version
        for message in stub.Watch(api.WatchRequest(target=target, resource_version=version)):
            if message.HasField("event"):
                show(api.EventType.Name(message.event.type), message.event)
            version = message.resume_version or version  # the only version to resume from
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.OUT_OF_RANGE:
            version = ""  # expired: list again
        print("RESUMING", version, error.code(), flush=True)
        time.sleep(1)
