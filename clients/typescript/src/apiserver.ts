// Reads from a kube-apiserver while kubefan is away: `ClientOptions.apiserver`.
//
// It needs no other package. `Apiserver.fromKubeConfig` takes the configuration of the official
// client, for kubeconfig files with all their ways to log in. docs/clients-fallback.md says when
// the apiserver is asked, and what a program sees.

import { readFileSync } from "node:fs";
import * as http from "node:http";
import * as https from "node:https";
import { inspect } from "node:util";
import { decoderOf } from "./apiserver-watch.js";
import { failureAt, plainTextAt, refusalAt } from "./apiserver-errors.js";
import { findResource, knownResource } from "./discovery.js";
import { KubefanError } from "./errors.js";
import type { Resource } from "./items.js";
import { KubeObject, type EventType } from "./objects.js";
import { leavesOut, type Projection, type TargetOptions } from "./options.js";
import { fieldsOf, itemsOf, project, withKind } from "./raw-json.js";
import { ErrorReason } from "./reasons.js";
import { Token } from "./token.js";

const ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount";
/** The limit of a list or a get. kube-apiserver's own limit is a minute. */
const READ_MS = 120_000;
/** The shortest timeout of a watch, and the longest is twice that, as in client-go. */
const WATCH_SECONDS_MIN = 300;
/** The apiserver may keep a watch for this long without its headers. */
const WATCH_HEADERS_MS = 30_000;
/** The apiserver gets this time to end a watch after its timeout. */
const WATCH_GRACE_MS = 30_000;
/** A connection that is silent for this long gets a TCP keepalive. */
const KEEPALIVE_MS = 15_000;
const JSON_TYPE = "application/json";
const METADATA = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io";
const METADATA_LIST = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";
const DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/** The credentials for an apiserver. Files are read for each request. */
export interface ApiserverOptions {
  /** PEM file with the CA that signed the apiserver's certificate. */
  readonly caFile?: string;
  readonly token?: string;
  /** A file with a token, which takes precedence. */
  readonly tokenFile?: string;
  readonly clientCertificateFile?: string;
  readonly clientKeyFile?: string;
}

/** The part of `KubeConfig` of `@kubernetes/client-node` that is used. */
export interface KubeConfigLike {
  getCurrentCluster(): { readonly server: string } | null;
  applyToHTTPSOptions(options: https.RequestOptions): Promise<void>;
}

/** @internal A request to the apiserver. */
export interface ApiserverRead {
  readonly resource: string;
  readonly target: TargetOptions;
  readonly projection: Projection;
  /** The resource as kubefan has resolved it. */
  readonly resolved: Resource | undefined;
  readonly signal: AbortSignal;
}

/** @internal A state of the apiserver. */
export interface ApiserverList {
  readonly version: string;
  readonly resource: Resource;
  readonly objects: KubeObject[];
}

/** @internal An event of the apiserver, or the version of a bookmark. */
export type ApiserverEvent =
  { readonly type: EventType; readonly object: KubeObject } | { readonly bookmark: string };

/** An apiserver, and the credentials for it. */
export class Apiserver {
  readonly server: string;
  readonly #prepare: (options: https.RequestOptions) => Promise<void>;
  readonly #places = new Map<string, Resource>();

  /**
   * `server` is a URL, such as `https://10.0.0.1:6443`. `prepare` adds more to each request. Throws
   * a `TypeError` for another address, and for credentials without TLS.
   */
  constructor(
    server: string,
    options: ApiserverOptions = {},
    prepare?: (options: https.RequestOptions) => Promise<void>,
  ) {
    this.server = serverOf(server);
    if (this.server.startsWith("http://") && Object.keys(options).length > 0) {
      throw new TypeError(`${server} has no TLS, so it takes no credentials and no caFile`);
    }
    const token = new Token(options.token, options.tokenFile);
    this.#prepare = async (request) => {
      const { caFile, clientCertificateFile: cert, clientKeyFile: key } = options;
      Object.assign(request, {
        ...(caFile === undefined ? {} : { ca: readFileSync(caFile) }),
        ...(cert === undefined ? {} : { cert: readFileSync(cert) }),
        ...(key === undefined ? {} : { key: readFileSync(key) }),
      });
      const header = token.header();
      if (header !== undefined) {
        Object.assign(request.headers ?? {}, { Authorization: header });
      }
      await prepare?.(request);
    };
  }

  /** The apiserver of the pod's cluster, with the token of its service account. */
  static inCluster(): Apiserver {
    const host = process.env["KUBERNETES_SERVICE_HOST"];
    const port = process.env["KUBERNETES_SERVICE_PORT"];
    if (host === undefined || port === undefined) {
      throw new TypeError("KUBERNETES_SERVICE_HOST and _PORT are not set: this is no pod");
    }
    return new Apiserver(`https://${host.includes(":") ? `[${host}]` : host}:${port}`, {
      caFile: `${ACCOUNT}/ca.crt`,
      tokenFile: `${ACCOUNT}/token`,
    });
  }

  /** The apiserver of a `KubeConfig` of the official client, `@kubernetes/client-node`. */
  static fromKubeConfig(config: KubeConfigLike): Apiserver {
    const cluster = config.getCurrentCluster();
    if (cluster === null) {
      throw new TypeError("the kubeconfig has no current cluster");
    }
    return new Apiserver(cluster.server, {}, (options) => config.applyToHTTPSOptions(options));
  }

  /** @internal What a log shows: nothing of the credentials. */
  [inspect.custom](): string {
    return `Apiserver("${this.server}")`;
  }

  /** @internal The present state. */
  async list(read: ApiserverRead): Promise<ApiserverList> {
    const resource = await this.#place(read);
    const accept = read.projection.metadataOnly === true ? METADATA_LIST : JSON_TYPE;
    const path = pathOf(resource, read.target) + queryOf(selectionOf(read.target));
    const text = await this.#text(path, accept, read.signal, ErrorReason.RESOURCE_NOT_FOUND);
    const fields = new Map((fieldsOf(text) ?? []).map(({ name, value }) => [name, value]));
    const textOf = (name: string): string => JSON.parse(fields.get(name) ?? '""') as string;
    const metadata = JSON.parse(fields.get("metadata") ?? "{}") as { resourceVersion?: string };
    if (metadata.resourceVersion === undefined) {
      throw failureAt(this.server, "a list without a version");
    }
    const kind = textOf("kind").replace(/List$/, "");
    const items = itemsOf(fields.get("items") ?? "[]") ?? [];
    const objects = items.map((item) =>
      objectOf(withKind(item, kind, textOf("apiVersion")), read.projection),
    );
    return { version: metadata.resourceVersion, resource, objects };
  }

  /** @internal One object. */
  async get(read: ApiserverRead): Promise<KubeObject> {
    const resource = await this.#place(read);
    const accept = read.projection.metadataOnly === true ? METADATA : JSON_TYPE;
    const path = pathOf(resource, read.target, read.target.name);
    const text = await this.#text(path, accept, read.signal, ErrorReason.OBJECT_NOT_FOUND);
    return objectOf(text.trim(), read.projection);
  }

  /** @internal The events after a version. They end after the watch's timeout. */
  async watch(read: ApiserverRead, version: string): Promise<AsyncGenerator<ApiserverEvent>> {
    const resource = await this.#place(read);
    const seconds = Math.round(WATCH_SECONDS_MIN * (1 + Math.random()));
    const query = queryOf({
      ...selectionOf(read.target),
      watch: "true",
      allowWatchBookmarks: "true",
      resourceVersion: version,
      timeoutSeconds: String(seconds),
    });
    const accept = read.projection.metadataOnly === true ? METADATA : JSON_TYPE;
    const late = new AbortController();
    const abort = (): void => {
      late.abort();
    };
    const headers = setTimeout(abort, WATCH_HEADERS_MS);
    const limit = AbortSignal.timeout(seconds * 1_000 + WATCH_GRACE_MS);
    const response = await this.#send(
      pathOf(resource, read.target) + query,
      accept,
      AbortSignal.any([read.signal, late.signal, limit]),
      ErrorReason.RESOURCE_NOT_FOUND,
    ).finally(() => {
      clearTimeout(headers);
    });
    return decoderOf(this.server, response, (text) => objectOf(text, read.projection));
  }

  async #text(
    path: string,
    accept: string,
    signal: AbortSignal,
    notFound: string,
  ): Promise<string> {
    const limited = AbortSignal.any([signal, AbortSignal.timeout(READ_MS)]);
    const response = await this.#send(path, accept, limited, notFound);
    try {
      return await bodyOf(response);
    } catch (error) {
      throw failureAt(this.server, `an answer that broke: ${messageOf(error)}`);
    }
  }

  /** An answer that is no error. Each request has a connection of its own. */
  async #send(
    path: string,
    accept: string,
    signal: AbortSignal,
    notFound: string,
  ): Promise<http.IncomingMessage> {
    let response: http.IncomingMessage;
    try {
      const options: https.RequestOptions = {
        method: "GET",
        headers: { Accept: accept, "User-Agent": "kubefan-typescript" },
        agent: false,
        signal,
      };
      await this.#prepare(options);
      // A kubeconfig may name a server without TLS. Only a loopback address is safe then.
      if (isOpenToOthers(this.server) && hasCredentials(options)) {
        throw plainTextAt(this.server);
      }
      response = await new Promise((resolve, reject) => {
        const url = this.server + path;
        const sent = url.startsWith("https:")
          ? https.request(url, options, resolve)
          : http.request(url, options, resolve);
        sent.on("error", reject);
        sent.setSocketKeepAlive(true, KEEPALIVE_MS);
        sent.end();
      });
      if (response.statusCode === 200) {
        return response;
      }
    } catch (error) {
      if (error instanceof KubefanError) {
        throw error;
      }
      throw failureAt(this.server, `cannot reach it: ${messageOf(error)}`);
    }
    const body = await bodyOf(response).catch(() => "");
    const status = response.statusCode ?? 500;
    throw refusalAt(this.server, status, body, notFound, response.headers["retry-after"]);
  }

  /**
   * Finds a resource: as kubefan has resolved it, as the target names it, among the built-in ones,
   * or in the discovery documents.
   */
  async #place(read: ApiserverRead): Promise<Resource> {
    const known = read.resolved ?? knownResource(read.resource, read.target);
    if (known !== undefined) {
      return known;
    }
    const { group } = read.target;
    const name = group === undefined || group === "" ? read.resource : `${read.resource}.${group}`;
    const cached = this.#places.get(name);
    if (cached !== undefined) {
      return cached;
    }
    // The core group comes first, then the groups in the server's order.
    for (const root of ["/api", "/apis"]) {
      const text = await this.#text(root, DISCOVERY, read.signal, ErrorReason.RESOURCE_NOT_FOUND);
      const found = findResource(text, name);
      if (found !== undefined) {
        this.#places.set(name, found);
        return found;
      }
    }
    const message = JSON.stringify({ message: `it doesn't have a resource type "${name}"` });
    throw refusalAt(this.server, 404, message, ErrorReason.RESOURCE_NOT_FOUND);
  }
}

function serverOf(server: string): string {
  const url = URL.canParse(server) ? new URL(server) : undefined;
  if (url === undefined || !/^https?:$/.test(url.protocol) || url.search !== "") {
    throw new TypeError(`"${server}" is no URL of an apiserver, such as https://10.0.0.1:6443`);
  }
  return server.replace(/\/+$/, "");
}

/** Whether requests leave this machine without TLS. */
function isOpenToOthers(server: string): boolean {
  const { protocol, hostname } = new URL(server);
  const isLoopback =
    hostname === "localhost" || hostname === "[::1]" || /^127(\.[0-9]+){3}$/.test(hostname);
  return protocol === "http:" && !isLoopback;
}

function hasCredentials({ auth, headers }: https.RequestOptions): boolean {
  const names = Object.keys(headers ?? {});
  return typeof auth === "string" || names.some((name) => name.toLowerCase() === "authorization");
}

function selectionOf(target: TargetOptions): Record<string, string> {
  const { name = "", fieldSelector = "", labelSelector = "" } = target;
  const fields = [name === "" ? "" : `metadata.name=${name}`, fieldSelector];
  return { labelSelector, fieldSelector: fields.filter((field) => field !== "").join(",") };
}

function queryOf(parameters: Record<string, string>): string {
  const given = Object.entries(parameters).filter(([, value]) => value !== "");
  return given.length === 0 ? "" : `?${new URLSearchParams(given).toString()}`;
}

function pathOf(resource: Resource, target: TargetOptions, name = ""): string {
  const { group, version, namespaced } = resource;
  const { namespace = "" } = target;
  const api = group === "" ? `/api/${version}` : `/apis/${group}/${version}`;
  const within =
    namespace !== "" && namespaced ? `/namespaces/${encodeURIComponent(namespace)}` : "";
  const one = name === "" ? "" : `/${encodeURIComponent(name)}`;
  return `${api}${within}/${resource.resource}${one}`;
}

/** An object from its text. */
function objectOf(text: string, projection: Projection): KubeObject {
  const metadata = (fieldsOf(text) ?? []).find(({ name }) => name === "metadata")?.value ?? "{}";
  const known = JSON.parse(metadata) as Record<string, string | undefined>;
  const { namespace = "", name = "", uid = "", resourceVersion = "" } = known;
  const kept = leavesOut(projection) ? project(text, projection) : text;
  return new KubeObject(namespace, name, uid, resourceVersion, Buffer.from(kept));
}

async function bodyOf(response: http.IncomingMessage): Promise<string> {
  const parts: Buffer[] = [];
  for await (const part of response) {
    parts.push(part as Buffer);
  }
  return Buffer.concat(parts).toString("utf8");
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
