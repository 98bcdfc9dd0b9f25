// The types use those of Node: also in a project that names its own `types`.
/// <reference types="node" preserve="true" />
/**
 * Watch Kubernetes objects through kubefan: watches that resume by themselves, and informers.
 *
 * @packageDocumentation
 */

export { Apiserver, type ApiserverOptions, type KubeConfigLike } from "./apiserver.js";
export { Client } from "./client.js";
export type { ClientOptions } from "./endpoint.js";
export {
  Expired,
  Forbidden,
  InvalidAddress,
  InvalidArgument,
  KubefanError,
  LimitReached,
  NotCached,
  NotFound,
  ProtocolError,
  Stopped,
  Unauthenticated,
  Unavailable,
  Undecodable,
  Unreachable,
  type ErrorDetails,
  type StatusCode,
} from "./errors.js";
export { Side, type Budget } from "./fallback.js";
export type { Deleted, EventHandler } from "./handlers.js";
export { IN_CLUSTER_ADDRESS, inClusterOptions } from "./in-cluster.js";
export type { Informer, Registration } from "./informer.js";
export type {
  Bookmark,
  CatchUpBegin,
  CatchUpEnd,
  Disconnected,
  GapBegin,
  GapEnd,
  Reconnected,
  Resource,
  Restarted,
  SnapshotBegin,
  SnapshotEnd,
  WatchEvent,
  WatchItem,
} from "./items.js";
export type { ObjectList, ResourceStatus } from "./messages.js";
export { DeleteReason, EventType, KubeObject, type AnyValue } from "./objects.js";
export {
  Encoding,
  Fallback,
  OnExpired,
  OnLag,
  Projection,
  type BackoffOptions,
  type CallOptions,
  type GetOptions,
  type HandlerOptions,
  type InformerOptions,
  type ListOptions,
  type ReadOptions,
  type StopOptions,
  type TargetOptions,
  type WaitOptions,
  type WatchOptions,
} from "./options.js";
export { ErrorMetadata, ErrorReason, GapReason } from "./reasons.js";
export type { IndexFunction, Indexer } from "./store.js";
export { VERSION } from "./version.js";
export type { WatchItems, WatchStream } from "./watch.js";
