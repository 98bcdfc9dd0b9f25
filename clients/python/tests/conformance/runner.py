"""The Python runner of the script in `clients/conformance`.

It reads commands as lines of JSON, and writes what the client reports as lines of JSON.
`clients/conformance/README.md` describes the lines.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Optional, Union

from kubefan import (
    Apiserver,
    BackoffOptions,
    Budget,
    CatchUpBegin,
    CatchUpEnd,
    Client,
    ClientOptions,
    Deleted,
    Disconnected,
    Encoding,
    Event,
    Expired,
    GapBegin,
    GapEnd,
    Informer,
    KubefanError,
    Object,
    OnExpired,
    OnLag,
    Projection,
    Reconnected,
    Registration,
    Restarted,
    SnapshotBegin,
    SnapshotEnd,
    WatchItem,
    WatchItems,
    WatchStream,
)

from .asyncio_informer import AsyncioInformer

SYNC_SECONDS_MAX = 60.0
Line = dict[str, Any]

_out = threading.Lock()
#: What was reported of quiet sources: how often, by item. The lock guards it.
_counts: dict[str, Counter[str]] = {}
#: The marks that say nothing more.
_MARKS = {
    GapEnd: "gap_end",
    CatchUpBegin: "catch_up_begin",
    CatchUpEnd: "catch_up_end",
    Reconnected: "reconnected",
}


def say(line: Line) -> None:
    """Writes one line."""
    with _out:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def report(source: str, item: Line) -> None:
    """Writes what a watch or an informer reports, or counts it."""
    with _out:
        counts = _counts.get(source)
        if counts is not None:
            counts[item["item"]] += 1
            return
    say({**item, "from": source})


def shown(error: BaseException) -> Line:
    """An error."""
    if not isinstance(error, KubefanError):
        return {"code": "UNKNOWN", "message": repr(error)}
    return {
        "class": type(error).__name__,
        "code": error.code.name,
        "reason": error.reason,
        "field": error.field,
        "expired": isinstance(error, Expired),
        "retryable": error.is_retryable,
        "message": str(error),
    }


def shown_object(made: Object) -> Line:
    """An object: its key and its bytes."""
    return {"key": made.key, "object": made.raw.decode()}


def shown_item(item: WatchItem) -> Line:
    """An item of a watch."""
    if isinstance(item, Event):
        return {
            **shown_object(item.object),
            "item": "event",
            "type": str(item.type),
            "delete_reason": str(item.delete_reason or "UNSPECIFIED"),
            "uid": item.object.uid,
            "version": item.object.resource_version,
        }
    if isinstance(item, SnapshotBegin):
        return {"item": "snapshot_begin", "restarted_from": item.restarted_from}
    if isinstance(item, SnapshotEnd):
        return {"item": "snapshot_end", "count": item.object_count}
    if isinstance(item, GapBegin):
        return {"item": "gap_begin", "reason": item.reason}
    if isinstance(item, Disconnected):
        return {"item": "disconnected", "error": shown(item.error)}
    if isinstance(item, Restarted):
        return {"item": "restarted", "error": shown(item.error)}
    return {"item": _MARKS.get(type(item), "bookmark")}


def follow(source: str, watch: Union[WatchItems, WatchStream]) -> None:
    """Reports every item of a watch."""
    items: Iterator[WatchItem] = watch
    try:
        for item in items:
            report(
                source,
                {**shown_item(item), "resume": watch.resume_version, "cluster": watch.cluster},
            )
    except Exception as error:
        report(source, {"item": "failed", "error": shown(error)})
    report(source, {"item": "end"})


def target(command: Line) -> dict[str, Any]:
    """The keywords of a target."""
    names = ("namespace", "name", "label_selector", "field_selector")
    return {name: command[name] for name in names if name in command}


def projection(command: Line) -> Projection:
    """The projection of a command."""
    return Projection(
        paths=tuple(command.get("fields", ())),
        metadata_only=command.get("metadata_only", False),
        drop_managed_fields=command.get("drop_managed_fields", False),
    )


def seconds(command: Line, name: str) -> Optional[float]:
    """A time in seconds."""
    return command[name] / 1000 if name in command else None


def watch_options(command: Line) -> dict[str, Any]:
    """The keywords of a watch."""
    options: dict[str, Any] = {
        **target(command),
        "projection": projection(command),
        "only_changes": command.get("only_changes", False),
        "backoff": BackoffOptions(initial=0.05, max=0.5),
    }
    for name in ("resource_version", "cluster", "fallback"):
        if name in command:
            options[name] = command[name]
    for name in ("timeout", "bookmark_interval"):
        if f"{name}_ms" in command:
            options[name] = seconds(command, f"{name}_ms")
    kinds = {"encoding": Encoding, "on_expired": OnExpired, "on_lag": OnLag}
    for name, kind in kinds.items():
        if name in command:
            options[name] = kind(command[name])
    return options


class Runner:
    """Runs commands, one at a time."""

    def __init__(self) -> None:
        self.clients: dict[str, Client] = {}
        self.watches: dict[str, tuple[Union[WatchItems, WatchStream], threading.Thread]] = {}
        self.informers: dict[str, Union[Informer, AsyncioInformer]] = {}
        self.connections: dict[str, tuple[str, ClientOptions]] = {}
        self.registrations: dict[str, Registration] = {}

    def run(self, command: Line) -> Line:
        """Runs a command, and returns its answer."""
        if command.get("quiet"):
            with _out:
                _counts[command["as"]] = Counter()
        method = getattr(self, command["op"])
        answer: Optional[Line] = method(command, command.get("as", ""))
        return answer or {}

    def connect(self, command: Line, name: str) -> None:
        """Makes a client."""
        names = ("ca_file", "server_name", "token", "token_file")
        options: dict[str, Any] = {key: command[key] for key in names if key in command}
        for key in ("connect_timeout", "keepalive_interval", "keepalive_timeout"):
            if f"{key}_ms" in command:
                options[key] = seconds(command, f"{key}_ms")
        if "apiserver" in command:
            options["apiserver"] = Apiserver(
                command["apiserver"],
                ca_file=command["apiserver_ca_file"],
                token=command["apiserver_token"],
            )
            options["budget"] = Budget(command["budget_clients"], command["budget_rate"])
        make = Client if command.get("lazy") else Client.connect
        self.connections[name] = (command["address"], ClientOptions(**options))
        self.clients[name] = make(*self.connections[name])

    def list(self, command: Line, _: str) -> Line:
        """Lists objects."""
        found = self.clients[command["client"]].list(
            command["resource"],
            **target(command),
            resource_version=command.get("resource_version", ""),
            projection=projection(command),
        )
        objects = [shown_object(made) for made in found.objects]
        return {"version": found.resource_version, "cluster": found.cluster, "objects": objects}

    def get(self, command: Line, _: str) -> Line:
        """Gets one object."""
        made = self.clients[command["client"]].get(
            command["resource"],
            command["name"],
            command["namespace"],
            projection=projection(command),
        )
        return {"objects": [shown_object(made)]}

    def list_resources(self, command: Line, _: str) -> Line:
        """Lists the caches."""
        found = self.clients[command["client"]].list_resources()
        return {"resources": [it.resource.resource for it in found if it.resource]}

    def watch(self, command: Line, name: str) -> None:
        """Starts a watch with all marks."""
        client = self.clients[command["client"]]
        self._follow(name, client.watch_items(command["resource"], **watch_options(command)))

    def changes(self, command: Line, name: str) -> None:
        """Starts a watch with events only."""
        client = self.clients[command["client"]]
        self._follow(name, client.watch(command["resource"], **watch_options(command)))

    def _follow(self, name: str, watch: Union[WatchItems, WatchStream]) -> None:
        thread = threading.Thread(target=follow, args=(name, watch), daemon=True)
        self.watches[name] = (watch, thread)
        thread.start()

    def informer(self, command: Line, name: str) -> None:
        """Starts an informer with a handler."""
        client, resource, options = command["client"], command["resource"], watch_options(command)
        informer: Union[Informer, AsyncioInformer]
        if command.get("asyncio"):
            informer = AsyncioInformer(*self.connections[client], resource, options)
        else:
            informer = self.clients[client].informer(resource, **options)
        informer.on_error(lambda error: report(name, {"item": "error", "error": shown(error)}))
        self.informers[name] = informer
        self._handle(informer, name)
        informer.start()

    def handler(self, command: Line, name: str) -> None:
        """Adds a handler."""
        self._handle(self.informers[command["of"]], name)

    def _handle(self, informer: Union[Informer, AsyncioInformer], source: str) -> None:
        def on_add(made: Object, initial: bool) -> None:
            version = made.resource_version
            report(source, {"item": "add", "key": made.key, "initial": initial, "version": version})

        def on_update(old: Object, new: Object) -> None:
            versions = {"version": new.resource_version, "old": old.resource_version}
            report(source, {"item": "update", "key": new.key, **versions})

        def on_delete(gone: Deleted) -> None:
            unknown = gone.final_state_unknown
            report(source, {"item": "delete", "key": gone.key, "unknown": unknown})

        registration = informer.add_event_handler(on_add, on_update, on_delete)
        if registration is not None:
            self.registrations[source] = registration

    def wait_for_sync(self, _: Line, name: str) -> None:
        """Waits until a handler has the whole state."""
        self.registrations[name].wait_for_sync(SYNC_SECONDS_MAX)

    def wait_until(self, command: Line, name: str) -> Line:
        """Waits until a store has a version."""
        version = command["resource_version"]
        return {"reached": self.informers[name].wait_until(version, SYNC_SECONDS_MAX)}

    def store(self, _: Line, name: str) -> Line:
        """The objects of a store."""
        stored = self.informers[name].indexer.list()
        return {"objects": {made.key: [made.resource_version, made.uid] for made in stored}}

    def counts(self, _: Line, name: str) -> Line:
        """The reports of a quiet source."""
        with _out:
            return {"counts": dict(_counts[name])}

    def close(self, _: Line, name: str) -> None:
        """Ends the watch or informer with this name."""
        if name in self.watches:
            watch, thread = self.watches.pop(name)
            watch.close()
            thread.join(SYNC_SECONDS_MAX)
        if name in self.informers:
            self.informers.pop(name).stop()
            report(name, {"item": "end"})
        if name in self.clients:
            self.clients.pop(name).close()

    def reset(self, command: Line, _: str) -> None:
        """Ends everything."""
        for name in [*self.watches, *self.informers, *self.clients]:
            self.close(command, name)
        self.registrations.clear()
        with _out:
            _counts.clear()


def main() -> None:
    """Runs the commands of standard input."""
    say({"language": "python", "lacks": []})
    runner = Runner()
    for text in sys.stdin:
        command: Line = json.loads(text)
        try:
            say({"id": command["id"], "ok": runner.run(command)})
        except KubefanError as error:
            say({"id": command["id"], "error": shown(error)})


if __name__ == "__main__":
    main()
