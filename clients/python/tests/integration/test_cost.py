"""Memory and CPU time of a process that keeps all pods, beside the official client's.

`KUBEFAN_TEST_SCALE=full` takes 10,000 pods and 5,000 updates; `-s` prints the table.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from .processes import ApiServer, Kubefan, Process

READERS = ("official", "whole", "projected")
_WRITERS = 4
#: The official client decodes some ten pods a second on a busy machine.
_READ_SECONDS_MAX = 1800.0


def pod(name: str) -> dict[str, Any]:
    """A pod of about 5 KiB as JSON, with the annotations and variables of a usual workload."""
    return {
        "metadata": {
            "name": name,
            "labels": {"app": f"web-{hash(name) % 50}", "pod-template-hash": "7c9e3779b1"},
            "annotations": {f"example.com/setting-{at}": "x" * 60 for at in range(12)},
        },
        "spec": {
            "nodeName": f"node-{hash(name) % 100}",
            "containers": [
                {
                    "name": f"c{at}",
                    "image": f"registry.example.com/team/app-{at}:v1.2.3",
                    "env": [{"name": f"VARIABLE_{n}", "value": "y" * 20} for n in range(12)],
                    "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
                }
                for at in range(2)
            ],
        },
    }


def each(api: ApiServer, method: str, requests: list[tuple[str, Any]]) -> None:
    """Sends many requests over a few connections."""
    tls = ssl.create_default_context(cafile=str(api.directory / "ca.pem"))

    def send(share: list[tuple[str, Any]]) -> None:
        connection = http.client.HTTPSConnection("127.0.0.1", api.port, context=tls)
        kind = "merge-patch+json" if method == "PATCH" else "json"
        headers = {
            "Authorization": "Bearer token-of-admin",
            "Content-Type": f"application/{kind}",
        }
        for path, body in share:
            connection.request(method, path, json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
            assert response.status < 300, text
        connection.close()

    threads = [threading.Thread(target=send, args=(requests[at::_WRITERS],)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_an_informer_takes_less_than_the_official_client(
    private_api: ApiServer, tmp_path: Path
) -> None:
    pytest.importorskip("kubernetes")
    full = os.environ.get("KUBEFAN_TEST_SCALE") == "full"
    count, updates = (10_000, 5_000) if full else (300, 150)
    api, space = private_api, "/api/v1/namespaces/default/pods"
    each(api, "POST", [(space, pod(f"p-{number:05}")) for number in range(count)])
    program = Path(__file__).with_name("cost_reader.py")
    figures: dict[str, dict[str, Any]] = {}
    with Kubefan.serve(api, "--resource", "pods") as server:
        for number, how in enumerate(READERS):
            address = api.url if how == "official" else server.address
            arguments = [sys.executable, str(program), how, address, str(api.directory / "ca.pem")]
            reader = Process(arguments, tmp_path / f"{how}.log")
            reader.until_written("synced", _READ_SECONDS_MAX)
            each(
                api,
                "PATCH",
                [
                    (f"{space}/p-{at:05}", {"metadata": {"labels": {"round": f"r{number}"}}})
                    for at in range(updates)
                ],
            )
            each(api, "POST", [(space, pod("last"))])
            reader.until_written("resident_kib", _READ_SECONDS_MAX)
            figures[how] = json.loads(reader.text().splitlines()[-1])
            reader.end()
            api.ask("DELETE", f"{space}/last?gracePeriodSeconds=0")
    for how, values in figures.items():
        print(how, values)
    official, whole, projected = (figures[how] for how in READERS)
    assert whole["objects"] == projected["objects"] == official["objects"] == count + 1
    if full:
        for value in ("resident_kib", "cpu_seconds"):
            assert whole[value] <= official[value]
            assert projected[value] <= official[value] / 4
