// The store of an informer, with its indexes.
//
// A batch of changes is written without a pause, so a reader sees all of it or nothing.

import type { AnyValue, KubeObject } from "./objects.js";

/** Returns the values under which an index finds an object, or none. */
export type IndexFunction<T extends object = AnyValue> = (
  object: KubeObject<T>,
) => Iterable<string>;

/** Objects by key, by namespace, and by indexes of the program's own. They are read-only. */
export interface Indexer<T extends object = AnyValue> extends Iterable<KubeObject<T>> {
  /** The number of objects. */
  readonly size: number;
  /** The object with this key, `namespace/name`; undefined if there is none. */
  get(key: string): KubeObject<T> | undefined;
  /** Whether there is an object with this key. */
  has(key: string): boolean;
  /** All objects, in no particular order. */
  list(): KubeObject<T>[];
  /** The keys of all objects. */
  keys(): string[];
  /** The objects of a namespace. */
  byNamespace(namespace: string): KubeObject<T>[];
  /**
   * Adds an index, also of the objects that are stored already. Throws if the name is taken.
   *
   * If the function throws, the object is not in the index, and the observers of the informer get
   * the error.
   */
  addIndex(name: string, values: IndexFunction<T>): void;
  /** Adds an index of the values of a label. Read it with `byLabel`. */
  addLabelIndex(label: string): void;
  /** The objects with this value in an index. Throws for an unknown index. */
  byIndex(name: string, value: string): KubeObject<T>[];
  /** The objects with this value of a label. Throws without `addLabelIndex`. */
  byLabel(label: string, value: string): KubeObject<T>[];
  /** The values of an index that have objects. Throws for an unknown index. */
  indexValues(name: string): string[];
}

/** The store that the informer writes. */
export class Store<T extends object = AnyValue> implements Indexer<T> {
  readonly #objects = new Map<string, KubeObject<T>>();
  readonly #indexes = new Map<string, Index<T>>();
  readonly #observer: (error: unknown) => void;

  constructor(observer: (error: unknown) => void = () => undefined) {
    this.#observer = observer;
    this.addIndex("namespace", (made) => [made.namespace]);
  }

  get size(): number {
    return this.#objects.size;
  }

  get(key: string): KubeObject<T> | undefined {
    return this.#objects.get(key);
  }

  has(key: string): boolean {
    return this.#objects.has(key);
  }

  list(): KubeObject<T>[] {
    return [...this.#objects.values()];
  }

  keys(): string[] {
    return [...this.#objects.keys()];
  }

  [Symbol.iterator](): Iterator<KubeObject<T>> {
    return this.list()[Symbol.iterator]();
  }

  byNamespace(namespace: string): KubeObject<T>[] {
    return this.byIndex("namespace", namespace);
  }

  addIndex(name: string, values: IndexFunction<T>): void {
    if (this.#indexes.has(name)) {
      throw new Error(`there is an index "${name}" already`);
    }
    const index = new Index(values);
    this.#indexes.set(name, index);
    for (const [key, made] of this.#objects) {
      this.#insert(index, key, made);
    }
  }

  addLabelIndex(label: string): void {
    this.addIndex(`label:${label}`, (made) => {
      const value = made.labels[label];
      return value === undefined ? [] : [value];
    });
  }

  byIndex(name: string, value: string): KubeObject<T>[] {
    const found: KubeObject<T>[] = [];
    for (const key of this.#index(name).keys.get(value) ?? []) {
      const made = this.#objects.get(key);
      if (made !== undefined) {
        found.push(made);
      }
    }
    return found;
  }

  byLabel(label: string, value: string): KubeObject<T>[] {
    return this.byIndex(`label:${label}`, value);
  }

  indexValues(name: string): string[] {
    return [...this.#index(name).keys.keys()];
  }

  /** Stores or, with undefined, removes objects, all at once. */
  write(changes: Iterable<readonly [string, KubeObject<T> | undefined]>): void {
    for (const [key, made] of changes) {
      for (const index of this.#indexes.values()) {
        index.remove(key);
        if (made !== undefined) {
          this.#insert(index, key, made);
        }
      }
      if (made === undefined) {
        this.#objects.delete(key);
      } else {
        this.#objects.set(key, made);
      }
    }
  }

  #index(name: string): Index<T> {
    const index = this.#indexes.get(name);
    if (index === undefined) {
      throw new Error(`there is no index "${name}"`);
    }
    return index;
  }

  #insert(index: Index<T>, key: string, made: KubeObject<T>): void {
    let values: Set<string>;
    try {
      values = new Set(index.values(made));
    } catch (error) {
      this.#observer(error);
      return;
    }
    index.insert(key, values);
  }
}

class Index<T extends object> {
  /** The keys by value, in order of arrival. */
  readonly keys = new Map<string, Set<string>>();
  readonly #values = new Map<string, Set<string>>();

  constructor(readonly values: IndexFunction<T>) {}

  insert(key: string, values: Set<string>): void {
    if (values.size > 0) {
      this.#values.set(key, values);
    }
    for (const value of values) {
      const keys = this.keys.get(value);
      if (keys === undefined) {
        this.keys.set(value, new Set([key]));
      } else {
        keys.add(key);
      }
    }
  }

  remove(key: string): void {
    for (const value of this.#values.get(key) ?? []) {
      const keys = this.keys.get(value);
      keys?.delete(key);
      if (keys?.size === 0) {
        this.keys.delete(value);
      }
    }
    this.#values.delete(key);
  }
}
