// The handlers that an informer calls, and the calls that wait.
//
// A handler that is slower than the changes must not delay others, and must not fill the memory. So
// up to a limit every call waits, in order. Above it a change joins the last waiting call of the
// same object: the handler gets the first old state and the last new one. A deletion and a new
// object of the same name stay two calls.

import type { AnyValue, KubeObject } from "./objects.js";

/** The calls that wait for a handler before calls of one object are merged. */
export const BACKLOG_CALLS_MAX = 10_000;

/** A deleted object. */
export interface Deleted<T extends object = AnyValue> {
  /** `namespace/name`, or the name of an object without a namespace. */
  readonly key: string;
  /** Its last state, as far as it is known. */
  readonly object: KubeObject<T>;
  /**
   * Whether the deletion itself was missed, such as during a disconnect. Then `object` is the last
   * state that was received.
   */
  readonly finalStateUnknown: boolean;
}

/** The functions of a handler. Each may be missing, and each may be asynchronous. */
export interface EventHandler<T extends object = AnyValue> {
  onAdd?(object: KubeObject<T>, isInInitialList: boolean): unknown;
  onUpdate?(old: KubeObject<T>, object: KubeObject<T>): unknown;
  onDelete?(deleted: Deleted<T>): unknown;
}

/** A call of a handler. */
export type Notification<T extends object = AnyValue> =
  | { readonly kind: "add"; readonly object: KubeObject<T>; readonly isInInitialList: boolean }
  | { readonly kind: "update"; readonly old: KubeObject<T>; readonly object: KubeObject<T> }
  | {
      readonly kind: "delete";
      readonly object: KubeObject<T>;
      readonly finalStateUnknown: boolean;
    };

/** A call that waits. `initialListEnd` waits behind the calls of the initial list. */
export type Waiting<T extends object = AnyValue> =
  | Notification<T>
  | { readonly kind: "initialListEnd" };

/** Calls the function for a notification, and returns its result. */
export function callHandler<T extends object>(
  handler: EventHandler<T>,
  call: Notification<T>,
): unknown {
  switch (call.kind) {
    case "add":
      return handler.onAdd?.(call.object, call.isInInitialList);
    case "update":
      return handler.onUpdate?.(call.old, call.object);
    case "delete": {
      const { object, finalStateUnknown } = call;
      return handler.onDelete?.({ key: object.key, object, finalStateUnknown });
    }
  }
}

/** A place in the queue, so that a waiting call can be replaced. Undefined: it was cancelled. */
interface Cell<T extends object> {
  call: Waiting<T> | undefined;
}

/** The calls that wait for one handler. */
export class BacklogQueue<T extends object = AnyValue> {
  readonly #callsMax: number;
  #cells: Cell<T>[] = [];
  /** The first cell that has not been taken. */
  #head = 0;
  readonly #last = new Map<string, Cell<T>>();
  #waiting = 0;

  constructor(callsMax = BACKLOG_CALLS_MAX) {
    this.#callsMax = callsMax;
  }

  get size(): number {
    return this.#waiting;
  }

  /** Adds a call, or merges it. */
  push(call: Waiting<T>): void {
    const cell: Cell<T> = { call };
    if (call.kind !== "initialListEnd") {
      if (this.#waiting >= this.#callsMax && this.#merge(call)) {
        return;
      }
      this.#last.set(call.object.key, cell);
    }
    this.#cells.push(cell);
    this.#waiting++;
  }

  /** The next call; undefined if no call waits. */
  pop(): Waiting<T> | undefined {
    for (;;) {
      const cell = this.#cells[this.#head];
      if (cell === undefined) {
        this.#cells = [];
        this.#head = 0;
        return undefined;
      }
      this.#head++;
      if (this.#head > 1_024 && this.#head * 2 > this.#cells.length) {
        this.#cells = this.#cells.slice(this.#head);
        this.#head = 0;
      }
      const call = cell.call;
      if (call === undefined) {
        continue;
      }
      this.#waiting--;
      // A taken call must not be merged into any more.
      cell.call = undefined;
      if (call.kind !== "initialListEnd" && this.#last.get(call.object.key) === cell) {
        this.#last.delete(call.object.key);
      }
      return call;
    }
  }

  #merge(call: Notification<T>): boolean {
    const cell = this.#last.get(call.object.key);
    const waiting = cell?.call;
    if (cell === undefined || waiting === undefined || waiting.kind === "initialListEnd") {
      return false;
    }
    if (waiting.kind === "add" && call.kind === "update") {
      cell.call = { ...waiting, object: call.object };
    } else if (waiting.kind === "update" && call.kind === "update") {
      cell.call = { ...waiting, object: call.object };
    } else if (waiting.kind === "update" && call.kind === "delete") {
      cell.call = call;
    } else if (waiting.kind === "add" && call.kind === "delete") {
      // The handler never hears of the object.
      cell.call = undefined;
      this.#last.delete(call.object.key);
      this.#waiting--;
      if (this.#cells.length - this.#head > 2 * (this.#waiting + this.#callsMax)) {
        this.#cells = this.#cells.slice(this.#head).filter((one) => one.call !== undefined);
        this.#head = 0;
      }
    } else {
      return false;
    }
    return true;
  }
}
