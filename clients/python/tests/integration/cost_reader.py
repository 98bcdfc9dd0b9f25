"""One reader of all pods, in a process of its own: cost_reader.py HOW ADDRESS CA_FILE.

It keeps every pod, and prints its memory and CPU time when it has seen the pod `last`. HOW is
`official` (the `kubernetes` package: list, then watch), `whole` or `projected` (an informer).
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any


def report(objects: int) -> None:
    """Prints what this process has used."""
    lines = Path("/proc/self/status").read_text().splitlines()
    memory = dict(line.split(":", 1) for line in lines)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "objects": objects,
                "resident_kib": int(memory["VmRSS"].split()[0]),
                "peak_kib": int(memory["VmHWM"].split()[0]),
                "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
            }
        ),
        flush=True,
    )


def official(address: str, ca_file: str) -> None:
    """As the README of the official client shows it."""
    import kubernetes

    settings = kubernetes.client.Configuration(host=address)
    settings.ssl_ca_cert = ca_file
    settings.api_key = {"authorization": "Bearer token-of-admin"}
    core = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(settings))
    listed = core.list_pod_for_all_namespaces()
    pods: dict[Any, Any] = {
        (pod.metadata.namespace, pod.metadata.name): pod for pod in listed.items
    }
    version = listed.metadata.resource_version
    del listed
    print("synced", flush=True)
    watch = kubernetes.watch.Watch()
    for event in watch.stream(core.list_pod_for_all_namespaces, resource_version=version):
        pod = event["object"]
        pods[(pod.metadata.namespace, pod.metadata.name)] = pod
        if pod.metadata.name == "last":
            report(len(pods))
            return


def informer(address: str, projected: bool) -> None:
    """An informer of this package, and a handler that reads every object."""
    from kubefan import Client, Encoding, Object, Projection

    fields = Projection.fields("metadata.labels", "spec.nodeName", "status.phase")
    found = threading.Event()

    def read(pod: Object, *_: object) -> None:
        pod["metadata"].get("labels")
        if pod.name == "last":
            found.set()

    with Client(address) as client:
        pods = client.informer(
            "pods", projection=fields if projected else Projection(), encoding=Encoding.ZSTD
        )
        handler = pods.add_event_handler(read, lambda _, new: read(new))
        with pods:
            handler.wait_for_sync()
            print("synced", flush=True)
            found.wait()
            report(len(pods.indexer))


if __name__ == "__main__":
    how, address, ca_file = sys.argv[1:]
    if how == "official":
        official(address, ca_file)
    else:
        informer(address, how == "projected")
