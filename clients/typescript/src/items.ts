// The items of a watch. `Client.watch` has only events; `Client.watchItems` has all of them.

import type { KubefanError } from "./errors.js";
import type { AnyValue, DeleteReason, EventType, KubeObject } from "./objects.js";

/** A resource as kubefan resolved it. */
export interface Resource {
  readonly group: string;
  readonly version: string;
  readonly resource: string;
  readonly kind: string;
  readonly namespaced: boolean;
}

/** The fields of every item. */
interface Item {
  /**
   * The version to resume from after this item; empty inside a snapshot, a gap or a catch-up, and
   * where an item has none. The `resourceVersion` of an object is no version to resume from. Send
   * it back as it is: it need not be a number, and "218.end" is after all events of 218.
   */
  readonly resumeVersion: string;
}

/** One change, relative to the selector of the watch. */
export interface WatchEvent<T extends object = AnyValue> extends Item {
  readonly kind: "event";
  /**
   * ADDED, MODIFIED or DELETED. An object that starts to match is ADDED, one that no longer matches
   * is DELETED.
   */
  readonly type: EventType;
  /** The object after the change. For DELETED its last state, as far as it is known. */
  readonly object: KubeObject<T>;
  /** Set for DELETED. */
  readonly deleteReason?: DeleteReason;
}

/** A snapshot starts. The events up to its end replace everything that was known. */
export interface SnapshotBegin extends Item {
  readonly kind: "snapshotBegin";
  /** The version of the state. */
  readonly resourceVersion: string;
  /** The version that history could not resume from, if that is why. */
  readonly restartedFrom: string;
  /** The resource, if the server has named it. */
  readonly resource?: Resource;
}

/** The snapshot is complete. */
export interface SnapshotEnd extends Item {
  readonly kind: "snapshotEnd";
  readonly objectCount: number;
}

/** kubefan had to list again. The events up to `gapEnd` lead over the gap, and form a unit. */
export interface GapBegin extends Item {
  readonly kind: "gapBegin";
  /** Up to this version the stream was exact. */
  readonly resourceVersion: string;
  /** The reason why kubefan listed again, such as `expired`. */
  readonly reason: string;
}

/** The gap is complete. */
export interface GapEnd extends Item {
  readonly kind: "gapEnd";
}

/** The stream had fallen behind. The events up to `catchUpEnd` form a unit. */
export interface CatchUpBegin extends Item {
  readonly kind: "catchUpBegin";
  /** Up to this version the stream was exact. */
  readonly resourceVersion: string;
}

/** The catch-up is complete. */
export interface CatchUpEnd extends Item {
  readonly kind: "catchUpEnd";
}

/** Only the version to resume from has moved. */
export interface Bookmark extends Item {
  readonly kind: "bookmark";
}

/**
 * The connection broke; the watch retries by itself. The events of an open snapshot, gap or
 * catch-up do not count.
 */
export interface Disconnected extends Item {
  readonly kind: "disconnected";
  /** The reason of the break. */
  readonly error: KubefanError;
  /** The time until the next attempt. */
  readonly retryInMs: number;
}

/** The connection is back, and the watch continues after the version `since`. */
export interface Reconnected extends Item {
  readonly kind: "reconnected";
  readonly since: string;
}

/** History cannot resume from the version, so a snapshot follows. */
export interface Restarted extends Item {
  readonly kind: "restarted";
  readonly error: KubefanError;
  /** The time until the next attempt. */
  readonly retryInMs: number;
}

/** An item of a watch, distinguished by its `kind`. */
export type WatchItem<T extends object = AnyValue> =
  | WatchEvent<T>
  | SnapshotBegin
  | SnapshotEnd
  | GapBegin
  | GapEnd
  | CatchUpBegin
  | CatchUpEnd
  | Bookmark
  | Disconnected
  | Reconnected
  | Restarted;
