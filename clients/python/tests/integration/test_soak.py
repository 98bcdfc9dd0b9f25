"""kubefan and kube-apiserver are killed at random: stores stay equal, memory stays flat.

`KUBEFAN_SOAK_SECONDS` sets the duration; the default is 20.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from kubefan import BackoffOptions, Encoding, Projection
from tests.recorder import KINDS, Recorder

from .processes import ApiServer, Kubefan, until

#: How much the resident memory of this process may grow after the first quarter, in KiB.
GROWTH_KIB_MAX = 16 << 10
_OBJECTS = 60


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def test_stores_are_equal_after_random_kills(private_api: ApiServer) -> None:
    seconds = float(os.environ.get("KUBEFAN_SOAK_SECONDS", "20"))
    seed = int(os.environ.get("KUBEFAN_SEED", str(time.time_ns() % 10**6)))
    print(f"KUBEFAN_SEED={seed}")
    chance = random.Random(seed)
    api, space = private_api, private_api.namespace("soak")
    server = Kubefan.serve(api)
    address = server.address
    keywords: dict[str, Any] = {
        "namespace": space,
        "backoff": BackoffOptions(initial=0.05, max=1.0),
        "bookmark_interval": 1.0,
    }
    forms: list[dict[str, Any]] = [
        {},
        {"encoding": Encoding.ZSTD_DELTA},
        {"projection": Projection.fields("metadata.labels")},
        {"label_selector": "even=yes"},
    ]
    informers = [
        (Recorder(kind, address, "informer", "configmaps", **keywords, **form), form)
        for kind in KINDS
        for form in forms
    ]
    names: set[str] = set()
    kills = {"kubefan": 0, "kube-apiserver": 0}
    early = 0
    start = time.monotonic()
    next_kill = start + chance.uniform(1, 3)
    while time.monotonic() < start + seconds:
        name = f"c-{chance.randrange(_OBJECTS)}"
        labels = {"even": chance.choice(["yes", "no"]), "at": str(chance.randrange(10**6))}
        if name not in names:
            api.create(space, name, labels)
            names.add(name)
        elif chance.random() < 0.3:
            api.delete(space, name)
            names.remove(name)
        else:
            api.patch(space, name, {"metadata": {"labels": labels}})
        if not early and time.monotonic() > start + seconds / 4:
            early = resident_kib()
        if time.monotonic() > next_kill:
            if chance.random() < 0.7:
                kills["kubefan"] += 1
                server.end()
                server = Kubefan.serve(api, address=address)
            else:
                kills["kube-apiserver"] += 1
                api.restart()
            next_kill = time.monotonic() + chance.uniform(1, 6)
        for recorder, _ in informers:
            recorder.seen.clear()
            recorder.errors.clear()
    growth = resident_kib() - early
    api.create(space, "last", {"even": "yes"})
    for recorder, form in informers:
        labels_of = form.get("label_selector", "").replace("=", "%3D")

        def is_equal(recorder: Recorder = recorder, labels: str = labels_of) -> bool:
            stored = {one.name: one.resource_version for one in recorder.store}
            expected = api.stored(space, labels)
            if "projection" in str(recorder._arguments):
                return stored.keys() == expected.keys()
            return stored == expected

        until("the store to be equal", is_equal)
        assert "default/last" not in recorder.store
        recorder.close()
    server.end()
    print(f"{seconds:.0f} s, kills {kills}, memory grew by {growth} KiB after the first quarter")
    assert growth <= GROWTH_KIB_MAX
