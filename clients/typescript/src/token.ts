// A bearer token: fixed, or in a file that is replaced before the token expires.
//
// The hazard is a token in a log. So no error shows one, and fields that hold one are private.

import { readFileSync } from "node:fs";

/** The time after which a token file is read again. */
export const READ_INTERVAL_MS = 10_000;

/** The source of the `authorization` of each call. */
export class Token {
  readonly #file: string | undefined;
  readonly #clock: () => number;
  #header: string | undefined;
  #readAt: number | undefined;

  constructor(
    token: string | undefined,
    tokenFile: string | undefined,
    clock: () => number = () => performance.now(),
  ) {
    this.#file = tokenFile;
    this.#clock = clock;
    if (tokenFile === undefined && token !== undefined) {
      this.#header = headerOf(token);
    }
  }

  /** Whether calls are authorized at all. */
  get isSet(): boolean {
    return this.#file !== undefined || this.#header !== undefined;
  }

  /** Whether another token may take the place of this one. */
  get mayChange(): boolean {
    return this.#file !== undefined;
  }

  /**
   * The value for the next call. Undefined without a token.
   *
   * If the file can no longer be read, the last token stays in use. Throws if there is none.
   */
  header(): string | undefined {
    if (this.#file === undefined) {
      return this.#header;
    }
    const now = this.#clock();
    if (this.#readAt !== undefined && now - this.#readAt < READ_INTERVAL_MS) {
      return this.#header;
    }
    try {
      this.#header = readToken(this.#file);
    } catch (error) {
      if (this.#header === undefined) {
        throw error;
      }
    }
    this.#readAt = now;
    return this.#header;
  }

  /** Reads the file again after the server refused a token. Whether it has another one. */
  replacement(refused: string | undefined): boolean {
    if (this.#file === undefined) {
      return false;
    }
    try {
      this.#header = readToken(this.#file);
    } catch {
      return false;
    }
    this.#readAt = this.#clock();
    return this.#header !== refused;
  }

  /** Reads the file again for the next call, unless another call has done so already. */
  expire(sent: string | undefined): void {
    if (this.#header === sent) {
      this.#readAt = undefined;
    }
  }
}

// A short file on a file system in memory: reading it at once does not keep the event loop.
function readToken(file: string): string {
  const text = readFileSync(file, "utf8");
  try {
    return headerOf(text);
  } catch (error) {
    throw new Error(`token file ${file}: ${error instanceof Error ? error.message : "unusable"}`);
  }
}

function headerOf(token: string): string {
  const trimmed = token.trim();
  if (trimmed === "") {
    throw new Error("the token is empty");
  }
  if (!/^[\x20-\x7e]*$/.test(trimmed)) {
    throw new Error("the token has characters that a header cannot contain");
  }
  return `Bearer ${trimmed}`;
}
