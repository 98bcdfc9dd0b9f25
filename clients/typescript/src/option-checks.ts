// The names and values of options. JavaScript has no compiler to find a wrong one, and without its
// selector a watch has every object.

import type { ClientOptions } from "./endpoint.js";
import type { Budget } from "./fallback.js";
import type { EventHandler } from "./handlers.js";
import {
  Encoding,
  Fallback,
  OnExpired,
  OnLag,
  type BackoffOptions,
  type CallOptions,
  type GetOptions,
  type HandlerOptions,
  type InformerOptions,
  type ListOptions,
  type Projection,
  type ReadOptions,
  type StopOptions,
  type TargetOptions,
  type WaitOptions,
  type WatchOptions,
} from "./options.js";

/** All names of an interface. A missing one does not compile. */
type Names<T> = Readonly<Record<keyof T, true>>;

const TARGET: Names<TargetOptions> = {
  namespace: true,
  name: true,
  labelSelector: true,
  fieldSelector: true,
  group: true,
  version: true,
};
const READ: Names<ReadOptions> = { resourceVersion: true, projection: true, signal: true };
const LIST: Names<ListOptions> = { ...TARGET, ...READ };
const GET: Names<GetOptions> = { ...READ, group: true, version: true };
const INFORMER: Names<InformerOptions> = {
  ...TARGET,
  bookmarkIntervalMs: true,
  projection: true,
  onlyChanges: true,
  encoding: true,
  onLag: true,
  onExpired: true,
  fallback: true,
  deltaBaseBytesMax: true,
  backoff: true,
  signal: true,
};
const WATCH: Names<WatchOptions> = {
  ...INFORMER,
  resourceVersion: true,
  cluster: true,
  timeoutMs: true,
};
const CLIENT: Names<ClientOptions> = {
  caFile: true,
  serverName: true,
  token: true,
  tokenFile: true,
  clientCertificateFile: true,
  clientKeyFile: true,
  connectTimeoutMs: true,
  messageBytesMax: true,
  keepaliveIntervalMs: true,
  keepaliveTimeoutMs: true,
  apiserver: true,
  budget: true,
  onSide: true,
  onStart: true,
};
const CALL: Names<CallOptions> = { signal: true };
const WAIT: Names<WaitOptions> = { timeoutMs: true, signal: true };
const STOP: Names<StopOptions> = { timeoutMs: true };
const HANDLER: Names<HandlerOptions> = { backlogMax: true };
const ALL = {
  client: CLIENT,
  list: LIST,
  get: GET,
  listResources: CALL,
  watch: WATCH,
  informer: INFORMER,
  waitForSync: WAIT,
  waitUntil: WAIT,
  stop: STOP,
  addEventHandler: HANDLER,
};

const PROJECTION: Names<Projection> = {
  paths: true,
  metadataOnly: true,
  dropManagedFields: true,
  dropLastApplied: true,
};
const BACKOFF: Names<BackoffOptions> = {
  initialMs: true,
  maxMs: true,
  factor: true,
  jitter: true,
  resetAfterMs: true,
};
const BUDGET: Names<Budget> = { clients: true, rate: true };
/** The options that have options of their own. */
const PARTS = { projection: PROJECTION, backoff: BACKOFF, budget: BUDGET };
/** The options with a few values. */
const VALUES = { encoding: Encoding, onLag: OnLag, onExpired: OnExpired, fallback: Fallback };

const FUNCTIONS: Names<EventHandler> = { onAdd: true, onUpdate: true, onDelete: true };

/**
 * Throws a `TypeError` if an option, or a part of one, does not exist, or has none of its values.
 * It lists those that there are.
 */
export function checkOptions(of: keyof typeof ALL, options: unknown): void {
  if (!isRecord(options)) {
    throw new TypeError(`the options of ${of} are ${shown(options)}; they must be an object`);
  }
  checkNames(of, options, ALL[of]);
  for (const [name, known] of Object.entries(PARTS)) {
    const part = options[name];
    if (part === undefined) {
      continue;
    }
    if (!isRecord(part)) {
      throw new TypeError(`${name} is ${shown(part)}; it must be an object`);
    }
    checkNames(name, part, known);
    if (part["paths"] !== undefined) {
      checkPaths(part["paths"]);
    }
    if (name === "budget") {
      checkNumbers(part);
    }
  }
  for (const [name, known] of Object.entries(VALUES)) {
    const value = options[name];
    const allowed: unknown[] = Object.values(known);
    if (value !== undefined && !allowed.includes(value)) {
      throw new TypeError(`${name} is ${shown(value)}; it must be ${alternatives(allowed)}`);
    }
  }
}

/**
 * Throws a `TypeError` if a handler has no function that is called, or one with a misspelt name. It
 * may have fields of its own, and be of a class.
 */
export function checkHandler(handler: unknown): void {
  const names = Object.keys(FUNCTIONS);
  const functions = Object(handler) as Readonly<Record<string, unknown>>;
  const present = names.filter((name) => functions[name] !== undefined);
  if (present.length === 0) {
    throw new TypeError(`the handler has none of ${names.join(", ")}, so nothing would be called`);
  }
  for (const name of present) {
    if (typeof functions[name] !== "function") {
      throw new TypeError(`${name} is ${shown(functions[name])}; it must be a function`);
    }
  }
  const isMisspelt = (name: string): boolean =>
    /^on/i.test(name) && typeof functions[name] === "function" && !Object.hasOwn(FUNCTIONS, name);
  const misspelt = Object.keys(functions).find(isMisspelt);
  if (misspelt !== undefined) {
    throw new TypeError(`"${misspelt}" is no function of a handler; there are ${names.join(", ")}`);
  }
}

/** Without a path every field would be sent; a text would become a list of its characters. */
function checkPaths(paths: unknown): void {
  if (!Array.isArray(paths)) {
    throw new TypeError(`paths is ${shown(paths)}; it must be a list`);
  }
  if (paths.length === 0) {
    throw new TypeError("paths is empty, so it names no field; for whole objects leave it out");
  }
}

/** A budget of nothing would never start, and one of anything else would have no window. */
function checkNumbers(part: Readonly<Record<string, unknown>>): void {
  for (const [name, value] of Object.entries(part)) {
    if (value !== undefined && !(typeof value === "number" && value > 0 && value < Infinity)) {
      throw new TypeError(`${name} is ${shown(value)}; it must be a number above 0`);
    }
  }
}

function checkNames(of: string, options: object, known: object): void {
  const unknown = Object.keys(options).find((name) => !Object.hasOwn(known, name));
  if (unknown !== undefined) {
    const names = Object.keys(known).sort().join(", ");
    throw new TypeError(`"${unknown}" is no option of ${of}; there are ${names}`);
  }
}

function isRecord(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A wrong value in a message. */
function shown(value: unknown): string {
  if (typeof value === "string") {
    return JSON.stringify(value);
  }
  if (Array.isArray(value)) {
    return "a list";
  }
  return typeof value === "object" && value !== null ? "an object" : String(value);
}

/** `"a", "b" or "c"`. */
function alternatives(values: unknown[]): string {
  const quoted = values.map(shown);
  const last = quoted.pop() ?? "";
  return quoted.length === 0 ? last : `${quoted.join(", ")} or ${last}`;
}
