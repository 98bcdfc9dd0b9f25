"""Runs the unmodified Python client: lists pods in every way, then watches them from that version
until a pod with a given name arrives.

    watch.py KUBECONFIG NAMESPACE UNTIL
    watch.py DIRECTORY NAMESPACE UNTIL

DIRECTORY has the files of a pod's service account: token and ca.crt. The server's address then comes
from the environment.

Prints "listed" when the test may start to change pods, and at the end what was seen, as JSON."""

import json
import os
import sys
import threading

from kubernetes import client, config, watch

LISTS = {
    "consistent": {},
    "any": {"resource_version": "0"},
    "labels": {"label_selector": "stage=on"},
    "labels, any": {"label_selector": "stage in (on, off),!canary", "resource_version": "0"},
    "fields": {"field_selector": "spec.nodeName=node-1"},
    "name": {"field_selector": "metadata.name=first"},
}
# Each ends with the pod UNTIL, which all of them select.
WATCHES = {
    "all": {},
    "bookmarks": {"allow_watch_bookmarks": True},
    "labels": {"label_selector": "stage=on"},
    "fields": {"field_selector": "spec.nodeName=node-1"},
    "both": {"label_selector": "stage in (on, off)", "field_selector": "spec.nodeName!=node-2"},
}


def main():
    kubeconfig, namespace, until = sys.argv[1:]
    if os.path.isdir(kubeconfig):
        files = {"token_filename": f"{kubeconfig}/token", "cert_filename": f"{kubeconfig}/ca.crt"}
        config.incluster_config.InClusterConfigLoader(**files).load_and_set()
    else:
        config.load_kube_config(kubeconfig)
    api = client.CoreV1Api()
    seen = {"lists": {}, "watches": {}, "errors": {}}
    for name, options in LISTS.items():
        pods = api.list_namespaced_pod(namespace, **options)
        seen["lists"][name] = [api.api_client.sanitize_for_serialization(pod) for pod in pods.items]
    seen["lists"]["pages"] = list(pages(api, namespace))
    for name, options in {"nothing": {}, "version": {"resource_version": "x"}}.items():
        try:
            if name == "nothing":
                api.read_namespaced_pod("nothing", namespace)
            else:
                api.list_namespaced_pod(namespace, **options)
        except client.ApiException as error:
            seen["errors"][name] = [error.status, json.loads(error.body)]
    version = api.list_namespaced_pod(namespace).metadata.resource_version
    threads = [threading.Thread(target=follow, args=(seen["watches"], name, namespace, version, until)) for name in WATCHES]
    for thread in threads:
        thread.start()
    print("listed", flush=True)
    for thread in threads:
        thread.join()
    # A watch from an old version must replay the history.
    seen["watches"]["old version"] = events(namespace, until, {"resource_version": version})
    print(json.dumps(seen), flush=True)


def pages(api, namespace):
    token = None
    while token != "":
        page = api.list_namespaced_pod(namespace, limit=2, _continue=token)
        yield [pod.metadata.name for pod in page.items] + [page.metadata.remaining_item_count]
        token = page.metadata._continue or ""


def follow(watches, name, namespace, version, until):
    watches[name] = events(namespace, until, {"resource_version": version, **WATCHES[name]})


def events(namespace, until, options):
    api = client.CoreV1Api()
    watcher, seen = watch.Watch(), []
    for event in watcher.stream(api.list_namespaced_pod, namespace, timeout_seconds=300, **options):
        if event["type"] == "BOOKMARK":
            continue
        seen.append([event["type"], event["raw_object"]])
        if event["object"].metadata.name == until:
            watcher.stop()
    return seen


main()
