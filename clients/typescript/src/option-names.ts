// The names of options. JavaScript has no compiler to find a misspelt one, and without its selector
// a watch has every object.

import type { ClientOptions } from "./endpoint.js";
import type {
  GetOptions,
  InformerOptions,
  ListOptions,
  ReadOptions,
  TargetOptions,
  WatchOptions,
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
};
const ALL = { client: CLIENT, list: LIST, get: GET, watch: WATCH, informer: INFORMER };

/** Throws a `TypeError` if an option does not exist. It lists those that do. */
export function checkNames(of: keyof typeof ALL, options: object): void {
  const known = ALL[of];
  const unknown = Object.keys(options).find((name) => !(name in known));
  if (unknown !== undefined) {
    const names = Object.keys(known).sort().join(", ");
    throw new TypeError(`"${unknown}" is no option of ${of}; there are ${names}`);
  }
}
