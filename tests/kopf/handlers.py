"""An operator with kopf, which prints each call of its handlers.

In the shared namespace it only reads: each event of a ConfigMap is printed, and an index has all
ConfigMaps. In its own namespace it owns widgets: their creation, changes and deletion are handled, so
kopf writes finalizers, annotations and results.
"""

import json
import os

import kopf

GROUP = "integrations.example.com"


@kopf.on.login()
def login(**_):
    with open(os.environ["OPERATOR_TOKEN_FILE"], encoding="utf-8") as file:
        token = file.read().strip()
    return kopf.ConnectionInfo(
        server=os.environ["OPERATOR_SERVER"], ca_path=os.environ["OPERATOR_CA_FILE"], token=token
    )


@kopf.on.startup()
def configure(settings: kopf.OperatorSettings, **_):
    # The initial state comes with the watch, which kubefan answers from its cache. A list without a
    # version may be passed on to the apiserver.
    settings.watching.initial_streaming = True
    settings.posting.enabled = False


def called(handler, name, what):
    # Handlers run in threads, and `print` writes a line in two parts.
    os.write(1, (json.dumps({"handler": handler, "name": name, "what": what}) + "\n").encode())


@kopf.on.event("configmaps")
def event(type, name, body, **_):
    if "change" in body.get("data", {}):
        called("event", name, [type, body["data"]["change"]])


@kopf.index("configmaps")
def configmaps(name, body, **_):
    return {name: body.get("data", {}).get("change")}


@kopf.on.create(GROUP, "widgets")
def create(name, spec, **_):
    called("create", name, spec["change"])
    return spec["change"]


@kopf.on.update(GROUP, "widgets")
def update(name, diff, spec, **_):
    called("update", name, [list(item) for item in diff])
    return spec["change"]


@kopf.on.delete(GROUP, "widgets")
def delete(name, spec, **_):
    called("delete", name, spec["change"])


@kopf.on.probe(id="store")
def store(configmaps: kopf.Index, **_):
    return {name: list(changes) for name, changes in configmaps.items() if list(changes) != [None]}
