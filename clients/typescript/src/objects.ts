// Objects, and the kinds of their changes.
//
// An object keeps the JSON text that it arrived with, a fraction of the size of decoded values, and
// decodes it when it is read. The hazard is a store of which every object has been read once: so
// only the last `DECODED_MAX` objects keep their decoded form.

/** Objects of this process that keep their decoded form. The others decode again when read. */
export const DECODED_MAX = 256;

/** The kind of a change. */
export const EventType = { ADDED: "ADDED", MODIFIED: "MODIFIED", DELETED: "DELETED" } as const;
export type EventType = (typeof EventType)[keyof typeof EventType];

/**
 * Why an object is no longer part of a watch.
 *
 * - `OBJECT_DELETED`: it was deleted.
 * - `LEFT_SELECTOR`: it exists, but no longer matches the selector.
 * - `FINAL_STATE_UNKNOWN`: it existed before and does not exist now. Its final state was missed.
 */
export const DeleteReason = {
  OBJECT_DELETED: "OBJECT_DELETED",
  LEFT_SELECTOR: "LEFT_SELECTOR",
  FINAL_STATE_UNKNOWN: "FINAL_STATE_UNKNOWN",
} as const;
export type DeleteReason = (typeof DeleteReason)[keyof typeof DeleteReason];

/** A decoded object whose type the program does not name. */
// Programs read fields of objects that this package has no types for; `unknown` would make them
// check each step of `pod.value.status.phase`.
// eslint-disable-next-line @typescript-eslint/no-explicit-any
export type AnyValue = Record<string, any>;

const decoder = new TextDecoder();

/**
 * One Kubernetes object. `T` is the type of its JSON form, such as `V1Pod`.
 *
 * Do not change values that you read from it; `toJSON` returns a copy that may be changed.
 */
export class KubeObject<T extends object = AnyValue> {
  /** `namespace/name`, or the name of an object without a namespace. */
  readonly key: string;
  /** `metadata.uid`. */
  readonly uid: string;
  /** The version of the object, or of the change that it came with. */
  readonly resourceVersion: string;
  /** The object as JSON text, exactly as it was sent. */
  readonly raw: Uint8Array;
  #decoded: T | undefined;

  constructor(
    namespace: string,
    name: string,
    uid: string,
    resourceVersion: string,
    raw: Uint8Array,
  ) {
    this.key = namespace === "" ? name : `${namespace}/${name}`;
    this.uid = uid;
    this.resourceVersion = resourceVersion;
    this.raw = raw;
  }

  /** The namespace; empty for cluster-scoped objects. */
  get namespace(): string {
    return this.key.slice(0, Math.max(0, this.key.lastIndexOf("/")));
  }

  /** The name. */
  get name(): string {
    return this.key.slice(this.key.lastIndexOf("/") + 1);
  }

  /** `metadata.labels`; empty if there are none. */
  get labels(): Readonly<Record<string, string>> {
    const value = this.value as { metadata?: { labels?: Record<string, string> | null } | null };
    return value.metadata?.labels ?? {};
  }

  /** The decoded JSON. Read-only. */
  get value(): T {
    if (this.#decoded === undefined) {
      this.#decoded = this.toJSON();
      KubeObject.#keep(this);
    }
    return this.#decoded;
  }

  /** A copy of the decoded JSON, which the caller may change. */
  toJSON(): T {
    const value: unknown = this.raw.length === 0 ? {} : JSON.parse(decoder.decode(this.raw));
    const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
    return (isObject ? value : {}) as T;
  }

  /** Whether key, uid, version and JSON text are the same. */
  equals(other: KubeObject): boolean {
    return (
      this.key === other.key &&
      this.uid === other.uid &&
      this.resourceVersion === other.resourceVersion &&
      Buffer.compare(this.raw, other.raw) === 0
    );
  }

  toString(): string {
    return `${this.key} at ${this.resourceVersion}`;
  }

  static readonly #kept: { release: () => void }[] = [];
  static #next = 0;

  static #keep<T extends object>(made: KubeObject<T>): void {
    KubeObject.#kept[KubeObject.#next]?.release();
    KubeObject.#kept[KubeObject.#next] = {
      release: () => {
        made.#decoded = undefined;
      },
    };
    KubeObject.#next = (KubeObject.#next + 1) % DECODED_MAX;
  }
}
