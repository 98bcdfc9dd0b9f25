// Options of watches and lists: the same options, by the same names, as the other packages.

import { create } from "@bufbuild/protobuf";
import {
  ProjectionSchema,
  ProjectionType,
  TargetSchema,
  type Projection as ProjectionMessage,
  type Target as TargetMessage,
} from "./gen/kubefan/v1alpha1/watch_pb.js";

/** @internal Memory limit of the copies that `Encoding.ZSTD_DELTA` needs, in bytes. */
export const DELTA_BASE_BYTES_MAX = 2 ** 30;

/**
 * Encoding of objects on the wire. Events always carry whole objects.
 *
 * - `JSON`: every object as JSON.
 * - `ZSTD`: snapshots in compressed chunks, events as JSON. Without zstd in this Node: as `JSON`.
 * - `ZSTD_DELTA`: snapshots in compressed chunks, events as deltas to the previous state. The watch
 *   keeps a copy of each object. Experimental. Without dictionaries for zstd in this Node: as
 *   `ZSTD`, with the same bytes of each object.
 */
export const Encoding = { JSON: "json", ZSTD: "zstd", ZSTD_DELTA: "zstd-delta" } as const;
export type Encoding = (typeof Encoding)[keyof typeof Encoding];

/**
 * Reaction if the stream has fallen behind the events that the server retains.
 *
 * - `EXPIRE`: treat it as an expired version.
 * - `CONFLATE`: continue with a catch-up, which has each changed object once.
 */
export const OnLag = { EXPIRE: "expire", CONFLATE: "conflate" } as const;
export type OnLag = (typeof OnLag)[keyof typeof OnLag];

/**
 * Reaction if history cannot resume from the version.
 *
 * - `FAIL`: end with `Expired`.
 * - `RESTART`: start over with a snapshot.
 */
export const OnExpired = { FAIL: "fail", RESTART: "restart" } as const;
export type OnExpired = (typeof OnExpired)[keyof typeof OnExpired];

/**
 * Reaction while kubefan cannot be reached.
 *
 * - `PACED`: read from the apiserver, within the budget, if the client has one
 *   (`ClientOptions.apiserver`). Otherwise wait.
 * - `NEVER`: wait until it is back. The apiserver gets no request.
 */
export const Fallback = { PACED: "paced", NEVER: "never" } as const;
export type Fallback = (typeof Fallback)[keyof typeof Fallback];

/**
 * The parts of each object that are sent.
 *
 * Every projection that leaves something out also leaves out `metadata.managedFields` and
 * `metadata.resourceVersion`. The version is beside the object, as `KubeObject.resourceVersion`.
 */
export interface Projection {
  /**
   * Only these fields, such as `spec.nodeName`; 1 to 64. A path through a list applies to each
   * object in it. A backslash escapes a dot in a name:
   * `metadata.annotations.example\.com/name`.
   */
  readonly paths?: readonly string[];
  /** Only the metadata, as a PartialObjectMetadata. */
  readonly metadataOnly?: boolean;
  /** Leave out `metadata.managedFields`. */
  readonly dropManagedFields?: boolean;
  /** Leave out the annotation that `kubectl apply` writes. */
  readonly dropLastApplied?: boolean;
}

/** The usual projections. Others are literals: `{ dropManagedFields: true }`. */
export const Projection = {
  /** Only the fields at these paths: at least one. */
  fields: (...paths: string[]): Projection => ({ paths }),
  /** Only the metadata. */
  metadata: (): Projection => ({ metadataOnly: true }),
} as const;

/** @internal Whether a projection leaves anything out. */
export function leavesOut(projection: Projection): boolean {
  return (
    (projection.paths?.length ?? 0) > 0 ||
    projection.metadataOnly === true ||
    projection.dropManagedFields === true ||
    projection.dropLastApplied === true
  );
}

/** @internal A projection as a protobuf message. */
export function projectionMessage(
  projection: Projection,
  onlyChanges = false,
  canonical = false,
): ProjectionMessage {
  const paths = [...(projection.paths ?? [])];
  if (paths.length > 0 && projection.metadataOnly === true) {
    throw new TypeError("a projection has either paths or metadataOnly");
  }
  let type = ProjectionType.FULL;
  if (paths.length > 0) {
    type = ProjectionType.FIELD_MASK;
  } else if (projection.metadataOnly === true) {
    type = ProjectionType.METADATA;
  }
  return create(ProjectionSchema, {
    type,
    paths,
    dropManagedFields: projection.dropManagedFields === true || canonical,
    dropLastApplied: projection.dropLastApplied === true,
    onlyChanges,
  });
}

/** The delays before retries, in milliseconds. The defaults are those of client-go's reflector. */
export interface BackoffOptions {
  /** The first delay, before jitter. 800 by default. */
  readonly initialMs?: number;
  /** The longest delay, before jitter. 30,000 by default. */
  readonly maxMs?: number;
  /** The factor between two delays. 2 by default. */
  readonly factor?: number;
  /** The largest jitter, as a fraction: with 1, the default, 30 s become 30 to 60 s. */
  readonly jitter?: number;
  /** After this time without a failure the first delay applies again. 120,000 by default. */
  readonly resetAfterMs?: number;
}

/** The objects, besides the resource: like the path and query of a Kubernetes list request. */
export interface TargetOptions {
  /** Empty for all namespaces. */
  readonly namespace?: string;
  /** Empty for all names. */
  readonly name?: string;
  /** Such as `app=web,tier!=db`. */
  readonly labelSelector?: string;
  /** Such as `spec.nodeName=n1`. */
  readonly fieldSelector?: string;
  /** API group; empty if the name of the resource has it. */
  readonly group?: string;
  /** API version; empty for the one that kubefan caches. */
  readonly version?: string;
}

/** Options that end a call. */
export interface CallOptions {
  /** Cancels the call, which then rejects with the signal's reason. */
  readonly signal?: AbortSignal;
}

/** Options of a single read. */
export interface ReadOptions extends CallOptions {
  /** The state is not older than this version. */
  readonly resourceVersion?: string;
  /** The parts of each object to send. */
  readonly projection?: Projection;
}

/** The objects, and the options of the list. */
export interface ListOptions extends TargetOptions, ReadOptions {}

/** The group and version of an object, and the options of the read. */
export interface GetOptions extends ReadOptions, Pick<TargetOptions, "group" | "version"> {}

/** The objects, and the options of the watch. */
export interface WatchOptions extends TargetOptions {
  /**
   * Resume after this version: the `resumeVersion` of a watch of the same target, or the version of
   * a list. Empty starts with a snapshot.
   */
  readonly resourceVersion?: string;
  /** The cluster of that version, from the same place; empty if unknown. */
  readonly cluster?: string;
  /** The watch ends after this time. No limit by default. */
  readonly timeoutMs?: number;
  /** The silence before a bookmark; 60,000 by default, at least 1,000. */
  readonly bookmarkIntervalMs?: number;
  /** The parts of each object to send. */
  readonly projection?: Projection;
  /**
   * Do not send changes that leave the projected bytes as they were. Requires a projection that
   * leaves something out, or deltas.
   */
  readonly onlyChanges?: boolean;
  /** Encoding of objects on the wire. JSON by default. */
  readonly encoding?: Encoding;
  /** Reaction if the stream falls behind. CONFLATE by default. */
  readonly onLag?: OnLag;
  /**
   * Reaction if history cannot resume from the version. RESTART by default, FAIL with a
   * `resourceVersion`.
   */
  readonly onExpired?: OnExpired;
  /** Reaction while kubefan cannot be reached. PACED by default. */
  readonly fallback?: Fallback;
  /**
   * Memory limit of the copies that deltas need. Above it the watch continues without deltas. 1 GiB
   * by default.
   */
  readonly deltaBaseBytesMax?: number;
  /** The delays before retries. */
  readonly backoff?: BackoffOptions;
  /** Ends the watch, as `close` does. */
  readonly signal?: AbortSignal;
}

/** The options of an informer: it starts with the present state, and has no end of its own. */
export type InformerOptions = Omit<WatchOptions, "resourceVersion" | "cluster" | "timeoutMs">;

/** The longest wait, and the signal that ends it. */
export interface WaitOptions {
  /** The wait ends with `false` after this time. No limit by default. */
  readonly timeoutMs?: number;
  /** The wait rejects with the signal's reason. */
  readonly signal?: AbortSignal;
}

/** Options for stopping an informer. */
export interface StopOptions {
  /** The longest wait for the calls under way. 10,000 by default. */
  readonly timeoutMs?: number;
}

/** Options of a handler's calls. */
export interface HandlerOptions {
  /** Limit of waiting calls. Above it, changes of one object become one call. 10,000 by default. */
  readonly backlogMax?: number;
}

/** @internal The target as a protobuf message. */
export function targetMessage(resource: string, options: TargetOptions): TargetMessage {
  return create(TargetSchema, {
    group: options.group ?? "",
    version: options.version ?? "",
    resource,
    namespace: options.namespace ?? "",
    name: options.name ?? "",
    labelSelector: options.labelSelector ?? "",
    fieldSelector: options.fieldSelector ?? "",
  });
}
