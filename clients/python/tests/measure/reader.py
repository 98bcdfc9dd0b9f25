"""One informer of all pods, over kubefan or by the official client straight.

`tests/integration/languages/cost.rs` reads its memory and CPU time from outside, and describes the
lines that it reads and writes.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any


def expect(start: str) -> str:
    """Reads a line with this start, and returns the rest."""
    line = sys.stdin.readline()
    if not line.startswith(start) or not line:
        raise SystemExit(f"expected {start!r}, got {line!r}")
    return line[len(start) :].rstrip("\n")


def answer(line: str) -> None:
    """Writes a line."""
    print(line, flush=True)


def end(objects: int) -> None:
    """Reports that everything has arrived, collects garbage, and waits."""
    answer(f"current {objects}")
    expect("settle")
    gc.collect()
    answer("settled")
    sys.stdin.read()


def straight(address: str, ca_file: str, token: str) -> None:
    """A list and a watch, as the README of the official client shows them, and a store of both."""
    import kubernetes

    settings = kubernetes.client.Configuration(host=address)
    settings.ssl_ca_cert = ca_file
    settings.api_key = {"authorization": f"Bearer {token}"}
    core = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(settings))
    listed = core.list_pod_for_all_namespaces()
    pods: dict[tuple[str, str], Any] = {
        (pod.metadata.namespace, pod.metadata.name): pod for pod in listed.items
    }
    version = listed.metadata.resource_version
    del listed
    changed = threading.Condition()
    last = read = 0

    def follow() -> None:
        nonlocal last, read
        watch = kubernetes.watch.Watch()
        for event in watch.stream(core.list_pod_for_all_namespaces, resource_version=version):
            pod = event["object"]
            key = (pod.metadata.namespace, pod.metadata.name)
            with changed:
                if event["type"] == "DELETED":
                    pods.pop(key, None)
                else:
                    pods[key] = pod
                    read += len(pod.metadata.labels or {})
                last = int(pod.metadata.resource_version)
                changed.notify_all()

    # Before the changes: the apiserver remembers only the latest.
    threading.Thread(target=follow, daemon=True).start()
    answer(f"synced {len(pods)}")
    wanted = int(expect("until "))
    with changed:
        changed.wait_for(lambda: last >= wanted)
    end(len(pods))


def informer(mode: str, address: str, ca_file: str, token: str, paths: list[str]) -> None:
    """An informer of this package, and a handler that reads what a program would read."""
    from kubefan import Client, ClientOptions, Object, Projection

    projections = {
        "kubefan-json": Projection(),
        "kubefan-fields": Projection(paths=tuple(paths), drop_managed_fields=True),
        "kubefan-metadata": Projection(metadata_only=True, drop_managed_fields=True),
    }
    read = 0

    def use(pod: Object, *_: object) -> None:
        nonlocal read
        read += len(pod.labels)

    with Client(address, ClientOptions(ca_file=ca_file, token=token)) as client:
        pods = client.informer("pods", projection=projections[mode])
        handler = pods.add_event_handler(use, lambda _, new: use(new))
        with pods:
            handler.wait_for_sync()
            answer(f"synced {len(pods.indexer)}")
            pods.wait_until(expect("until "))
            end(len(pods.indexer))


def main() -> None:
    """Runs reader.py MODE ADDRESS CA_FILE TOKEN PATH..."""
    mode, address, ca_file, token, *paths = sys.argv[1:]
    answer("ready")
    expect("start")
    if mode == "straight-json":
        straight(address, ca_file, token)
    else:
        informer(mode, address, ca_file, token, paths)


if __name__ == "__main__":
    main()
