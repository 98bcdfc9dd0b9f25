// Turns the items of a watch into events that stand for themselves.
//
// A snapshot that replaces an earlier state becomes the difference to it: objects that are gone are
// DELETED, unchanged ones are left out. The events of a gap or a catch-up are a unit: they are held
// back until it is complete, and dropped if the stream breaks before.

import type { WatchEvent, WatchItem } from "./items.js";
import { DeleteReason, EventType, KubeObject } from "./objects.js";

/** The state of a watch's reader: the uid and version of each object. */
export class Changes {
  readonly #known = new Map<string, { uid: string; version: string }>();
  /** The keys of the snapshot that is arriving. */
  #seen: Set<string> | undefined;
  #unit: WatchEvent[] | undefined;

  /** The events that an item makes known. The last one has the item's `resumeVersion`. */
  accept(item: WatchItem): WatchEvent[] {
    switch (item.kind) {
      case "event":
        if (this.#seen !== undefined) {
          return this.#inSnapshot(item, this.#seen);
        }
        if (this.#unit !== undefined) {
          this.#unit.push(item);
          return [];
        }
        this.#apply(item);
        return [item];
      case "snapshotBegin":
        this.#seen = new Set();
        this.#unit = undefined;
        return [];
      case "snapshotEnd": {
        const seen = this.#seen;
        this.#seen = undefined;
        if (seen === undefined) {
          return [];
        }
        const gone = [...this.#known.keys()].filter((key) => !seen.has(key));
        return versioned(
          gone.map((key) => this.#deleted(key)),
          item.resumeVersion,
        );
      }
      case "gapBegin":
      case "catchUpBegin":
        this.#unit = [];
        return [];
      case "gapEnd":
      case "catchUpEnd": {
        const unit = this.#unit ?? [];
        this.#unit = undefined;
        for (const event of unit) {
          this.#apply(event);
        }
        return versioned(unit, item.resumeVersion);
      }
      case "disconnected":
      case "restarted":
        this.#seen = undefined;
        this.#unit = undefined;
        return [];
      default:
        return [];
    }
  }

  #apply(event: WatchEvent): void {
    const { key, uid, resourceVersion } = event.object;
    if (event.type === EventType.DELETED) {
      this.#known.delete(key);
    } else {
      this.#known.set(key, { uid, version: resourceVersion });
    }
  }

  #inSnapshot(event: WatchEvent, seen: Set<string>): WatchEvent[] {
    const { key, uid, resourceVersion } = event.object;
    seen.add(key);
    const known = this.#known.get(key);
    const events: WatchEvent[] = [];
    let made = event;
    if (known !== undefined) {
      if (known.uid === uid && known.version === resourceVersion) {
        return [];
      }
      if (known.uid === uid) {
        made = { ...event, type: EventType.MODIFIED };
      } else {
        events.push(this.#deleted(key));
      }
    }
    this.#known.set(key, { uid, version: resourceVersion });
    events.push(made);
    return events;
  }

  #deleted(key: string): WatchEvent {
    const { uid, version } = this.#known.get(key) ?? { uid: "", version: "" };
    this.#known.delete(key);
    const at = key.lastIndexOf("/");
    return {
      kind: "event",
      type: EventType.DELETED,
      object: metadataOnly(key.slice(0, Math.max(0, at)), key.slice(at + 1), uid, version),
      deleteReason: DeleteReason.FINAL_STATE_UNKNOWN,
      resumeVersion: "",
    };
  }
}

/** Returns an object with nothing but its identity. */
function metadataOnly(namespace: string, name: string, uid: string, version: string): KubeObject {
  const metadata = { name, uid, resourceVersion: version };
  const whole = { metadata: namespace === "" ? metadata : { ...metadata, namespace } };
  const raw = new TextEncoder().encode(JSON.stringify(whole));
  return new KubeObject(namespace, name, uid, version, raw);
}

function versioned(events: WatchEvent[], resumeVersion: string): WatchEvent[] {
  const last = events.at(-1);
  return last === undefined ? events : [...events.slice(0, -1), { ...last, resumeVersion }];
}
