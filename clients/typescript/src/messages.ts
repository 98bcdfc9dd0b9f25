// The requests that are not watches, and the conversion of their answers.

import { create } from "@bufbuild/protobuf";
import type { ApiserverList } from "./apiserver.js";
import * as api from "./gen/kubefan/v1alpha1/watch_pb.js";
import type { Resource } from "./items.js";
import { KubeObject, type AnyValue } from "./objects.js";
import {
  leavesOut,
  projectionMessage,
  targetMessage,
  type GetOptions,
  type ListOptions,
} from "./options.js";
import { receivedVersion, sentVersion } from "./resume-version.js";
import { resourceOf } from "./watch-state.js";

/** A complete list, at one version. */
export interface ObjectList<T extends object = AnyValue> extends Iterable<KubeObject<T>> {
  /** The version. A watch may start from it. See `resumeVersion` of a `WatchEvent`. */
  readonly resourceVersion: string;
  /** The objects in key order: namespace, then name. */
  readonly objects: readonly KubeObject<T>[];
  /** The cluster of the version, for `watch({ cluster })`; empty if it is unknown. */
  readonly cluster: string;
  /** The resource as kubefan resolved it. */
  readonly resource?: Resource;
}

/** The state of one cache. */
export interface ResourceStatus {
  /** The name by which it was requested, such as `pods`. */
  readonly name: string;
  /** `SYNCING`, `SYNCED`, `STALE`, `NOT_FOUND` or `FORBIDDEN`. */
  readonly state: string;
  /** The namespace of this cache; empty for the whole cluster. */
  readonly namespace: string;
  /** The reason for not serving, or the last upstream error. */
  readonly message: string;
  /** The version of the cache. */
  readonly resourceVersion: string;
  /** The oldest version that a watch can resume from. */
  readonly oldestResourceVersion: string;
  /** The number of objects. */
  readonly objectCount: number;
  /** Their size as JSON. */
  readonly objectBytes: number;
  /** The streams that watch it now. */
  readonly subscribers: number;
  /** Whether a client's request started the cache. */
  readonly onDemand: boolean;
  /** The full name; missing while it is not known. */
  readonly resource?: Resource;
}

/** @internal The request of a list. */
export function listRequest(resource: string, options: ListOptions): api.ListRequest {
  const projection = options.projection ?? {};
  return create(api.ListRequestSchema, {
    target: targetMessage(resource, options),
    resourceVersion: sentVersion(options.resourceVersion ?? "").version,
    ...(leavesOut(projection) ? { projection: projectionMessage(projection) } : {}),
  });
}

/** @internal The request of one object. */
export function getRequest(
  resource: string,
  name: string,
  namespace: string,
  options: GetOptions,
): api.GetRequest {
  const projection = options.projection ?? {};
  return create(api.GetRequestSchema, {
    target: targetMessage(resource, { ...options, name, namespace }),
    resourceVersion: sentVersion(options.resourceVersion ?? "").version,
    ...(leavesOut(projection) ? { projection: projectionMessage(projection) } : {}),
  });
}

/** @internal Puts a list together from its chunks. */
export class ListReader<T extends object> {
  readonly #objects: KubeObject<T>[] = [];
  #version = "";
  #cluster = "";
  #resource: Resource | undefined;

  /** Adds a chunk. Only the first one has the resource and the cluster. */
  accept(chunk: api.ListResponse): void {
    if (this.#version === "") {
      this.#cluster = chunk.cluster;
    }
    this.#version = receivedVersion(chunk.resourceVersion, chunk.versionIsComplete);
    if (chunk.resource !== undefined) {
      this.#resource = resourceOf(chunk.resource);
    }
    for (const made of chunk.objects) {
      this.#objects.push(objectOf(made));
    }
  }

  /** The list; undefined if the server sent no version. */
  result(): ObjectList<T> | undefined {
    if (this.#version === "") {
      return undefined;
    }
    const objects = this.#objects;
    return {
      resourceVersion: this.#version,
      objects,
      cluster: this.#cluster,
      ...(this.#resource === undefined ? {} : { resource: this.#resource }),
      [Symbol.iterator]: () => objects[Symbol.iterator](),
    };
  }
}

/** @internal A list of the apiserver, which has all events of its version. */
export function listOfApiserver<T extends object>(list: ApiserverList): ObjectList<T> {
  const objects = list.objects as KubeObject<T>[];
  return {
    resourceVersion: receivedVersion(list.version, true),
    objects,
    cluster: "",
    resource: list.resource,
    [Symbol.iterator]: () => objects[Symbol.iterator](),
  };
}

/** @internal The states of the caches, ordered by name. */
export function statusesOf(response: api.ListResourcesResponse): ResourceStatus[] {
  return response.resources.map((status) => ({
    name: status.name,
    state: api.ResourceState[status.state],
    namespace: status.namespace,
    message: status.message,
    resourceVersion: status.resourceVersion,
    oldestResourceVersion: status.oldestResourceVersion,
    objectCount: Number(status.objectCount),
    objectBytes: Number(status.objectBytes),
    subscribers: Number(status.subscribers),
    onDemand: status.onDemand,
    ...(status.resource === undefined ? {} : { resource: resourceOf(status.resource) }),
  }));
}

/** @internal An object of a list or a get. */
export function objectOf<T extends object>(made: api.Object$): KubeObject<T> {
  // A copy: the object's bytes are a part of the whole message, which would stay in memory.
  const raw = new Uint8Array(made.object);
  return new KubeObject(made.namespace, made.name, made.uid, made.resourceVersion, raw);
}
