// The connection to a server: the address, TLS, and the token.

import { readFileSync } from "node:fs";
import { isIP } from "node:net";
import { createSecureContext, type SecureContext } from "node:tls";
import type { Apiserver } from "./apiserver.js";
import { InvalidAddress } from "./errors.js";
import type { Budget, Side } from "./fallback.js";
import { Token } from "./token.js";

/** Settings of a connection. */
export interface ClientOptions {
  /**
   * PEM file with the CA that signed kubefan's certificate, in place of Node's CAs. Only for
   * `https://`. This file and those of the client's certificate are read for each new connection.
   */
  readonly caFile?: string;
  /** The name in kubefan's certificate, if it is not that of the address. Only for `https://`. */
  readonly serverName?: string;
  /** A bearer token. Only for `https://` and Unix sockets. */
  readonly token?: string;
  /**
   * A file with a token, which takes precedence. It is read again after 10 s, and at once when
   * kubefan refuses the token.
   */
  readonly tokenFile?: string;
  /** PEM file with the client's certificate. Only for `https://`. */
  readonly clientCertificateFile?: string;
  /** PEM file with its private key. */
  readonly clientKeyFile?: string;
  /** Limit for establishing a connection. 10,000 by default. */
  readonly connectTimeoutMs?: number;
  /** The longest message accepted, in bytes. 64 MiB by default. */
  readonly messageBytesMax?: number;
  /** A silent connection gets an HTTP/2 PING after this time. 30,000 by default. */
  readonly keepaliveIntervalMs?: number;
  /**
   * A PING without an answer for this time means that the connection is dead; a watch then
   * reconnects. 15,000 by default.
   */
  readonly keepaliveTimeoutMs?: number;
  /**
   * Is read from while kubefan is away, within the budget (docs/clients-fallback.md). With it the
   * defaults are 3,000 for connections, and 4,000 for each silence and PING.
   */
  readonly apiserver?: Apiserver;
  /** The limit of reads at the apiserver. A budget in kubefan's answers replaces it. */
  readonly budget?: Budget;
  /** Called with each state of kubefan and its reason. */
  readonly onSide?: (side: Side, reason: string) => void;
  /** Called with the time that each start at the apiserver has waited. */
  readonly onStart?: (waitedMs: number) => void;
}

/** @internal The options with the times that a fallback needs. */
export function withTimes(options: ClientOptions): ClientOptions {
  if (options.apiserver === undefined) {
    return options;
  }
  return {
    ...options,
    connectTimeoutMs: options.connectTimeoutMs ?? 3_000,
    keepaliveIntervalMs: options.keepaliveIntervalMs ?? 4_000,
    keepaliveTimeoutMs: options.keepaliveTimeoutMs ?? 4_000,
  };
}

/** @internal What a connection is made of. */
export interface Endpoint {
  /** The origin of each request. */
  readonly origin: string;
  /** The Unix socket, or the host and port. */
  readonly place: { readonly path: string } | { readonly host: string; readonly port: number };
  /** Undefined without TLS. */
  readonly tls: { readonly context: () => SecureContext; readonly serverName: string } | undefined;
  readonly token: Token;
}

const HOST_PORT = /^(\[[0-9a-fA-F:.]+\]|[^\s:/[\]@?#]+):([0-9]{1,5})$/;

/**
 * Reads an address: `host:port`, `http://…`, `https://…`, `dns:host:port`, `unix:/path`.
 *
 * Throws `InvalidAddress`, also for files that cannot be read, and for a token that others could
 * read on the way.
 *
 * @internal
 */
export function endpointOf(address: string, options: ClientOptions): Endpoint {
  const wrong = (problem: string): InvalidAddress =>
    new InvalidAddress(`"${address}": ${problem}`, { code: "INVALID_ARGUMENT" });
  // A program in JavaScript may have none.
  const place = typeof address === "string" ? placeOf(address) : undefined;
  if (place === undefined) {
    throw wrong(
      "not an address of kubefan; write it like 127.0.0.1:7443, https://host:port, " +
        "dns:host:port or unix:/path",
    );
  }
  let token: Token;
  try {
    token = new Token(options.token, options.tokenFile);
  } catch (error) {
    throw wrong(messageOf(error));
  }
  const isTls = address.startsWith("https://");
  if ("path" in place || isTls) {
    // Others cannot read the requests there.
  } else if (token.isSet) {
    throw wrong(
      "a token is sent only over TLS or to a Unix socket, because others could read it on the " +
        `way; use https://${address.replace(/^(http:\/\/|dns:\/*)/, "")} ` +
        "(kubefan serve --tls-cert-file), or leave the token out",
    );
  }
  if (!isTls) {
    const { caFile, clientCertificateFile, clientKeyFile, serverName } = options;
    if ((caFile ?? clientCertificateFile ?? clientKeyFile ?? serverName) !== undefined) {
      throw wrong("a CA file, a client certificate and a server name need an https:// address");
    }
    const authority = "path" in place ? "localhost" : authorityOf(place);
    return { origin: `http://${authority}`, place, tls: undefined, token };
  }
  if ("path" in place) {
    throw wrong("TLS needs a host and a port");
  }
  const { clientKeyFile: key, clientCertificateFile: certificate } = options;
  if ((key === undefined) !== (certificate === undefined)) {
    throw wrong("a client certificate needs both its file and the file of its key");
  }
  try {
    const context = contexts(options);
    const serverName = options.serverName ?? place.host;
    return { origin: `https://${authorityOf(place)}`, place, tls: { context, serverName }, token };
  } catch (error) {
    throw wrong(messageOf(error));
  }
}

function placeOf(address: string): Endpoint["place"] | undefined {
  if (address.startsWith("unix:")) {
    const path = address.slice("unix:".length).replace(/^\/\/(?=\/)/, "");
    return path === "" ? undefined : { path };
  }
  const match = HOST_PORT.exec(address.replace(/^(https?:\/\/|dns:\/*)/, "").replace(/\/+$/, ""));
  const port = Number(match?.[2]);
  if (match?.[1] === undefined || port < 1 || port > 65_535) {
    return undefined;
  }
  return { host: match[1].replace(/^\[|\]$/g, ""), port };
}

function authorityOf(place: { host: string; port: number }): string {
  return `${isIP(place.host) === 6 ? `[${place.host}]` : place.host}:${String(place.port)}`;
}

/**
 * Returns the TLS settings of each new connection. Throws now if a file is wrong.
 *
 * The files are read again each time, because a CA and a certificate get renewed while a program
 * runs. While they cannot be read, or do not belong together yet, the last ones stay in use.
 */
function contexts(options: ClientOptions): () => SecureContext {
  const { caFile, clientCertificateFile, clientKeyFile } = options;
  const read = (): SecureContext =>
    createSecureContext({
      ca: pem(caFile, "CERTIFICATE"),
      key: pem(clientKeyFile, "PRIVATE KEY"),
      cert: pem(clientCertificateFile, "CERTIFICATE"),
      minVersion: "TLSv1.2",
    });
  let last = read();
  if ((caFile ?? clientCertificateFile) === undefined) {
    return () => last;
  }
  return () => {
    try {
      last = read();
    } catch {
      // If the last ones no longer work, the connection's error names the problem.
    }
    return last;
  };
}

/** The content of a PEM file. A file without such a part would look like a wrong server. */
function pem(file: string | undefined, kind: string): string | undefined {
  if (file === undefined) {
    return undefined;
  }
  const content = readFileSync(file, "utf8");
  if (!content.includes(`${kind}-----`)) {
    throw new Error(`${file} contains no PEM ${kind.toLowerCase()}`);
  }
  return content;
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
