// When reads go to the apiserver instead of kubefan, and how often. Nothing here does I/O.
//
// docs/clients-fallback.md is the contract. The time comes from a clock, so tests have their own.

import {
  Expired,
  InvalidAddress,
  ProtocolError,
  Undecodable,
  type KubefanError,
} from "./errors.js";
import { ErrorReason } from "./reasons.js";

/** kubefan may answer nothing but "later" to reads of one kind for this long. */
export const BUSY_MS_MAX = 10_000;
/** Two "later" are in a row if there is no more time between them: retries come within a minute. */
export const BUSY_PAUSE_MS_MAX = 120_000;
/** kubefan must be healthy for this long before reads return to it. */
export const HOLD_MS_MIN = 30_000;
/** The longest hold, of a kubefan that fails soon after each return. */
export const HOLD_MS_MAX = 600_000;
/**
 * A smaller number of clients counts after only smaller ones were told for this long: a kubefan
 * that has just started does not know all of its clients yet.
 */
const CLIENTS_KEPT_MS = 600_000;
/** The longest window of a budget. */
const WINDOW_MS_MAX = 600_000;
/** The time between two probes of a kubefan that is away, a quarter more or less. */
export const PROBE_MS = 5_000;
/** After a return, watches leave the apiserver at a random moment between these. */
const RETURN_MS_MIN = 2_000;
const RETURN_MS_MAX = 60_000;
/** The metadata of kubefan's answers that has its budget. */
export const BUDGET_KEY = "kubefan-fallback";

/**
 * Where the reads of a client go.
 *
 * - `HEALTHY`: to kubefan.
 * - `AWAY`: to the apiserver, within the budget.
 * - `RETURNING`: to the apiserver. kubefan has been healthy for a while.
 */
export const Side = { HEALTHY: "healthy", AWAY: "away", RETURNING: "returning" } as const;
export type Side = (typeof Side)[keyof typeof Side];

/** The limit of reads that clients start at the apiserver while kubefan is away. */
export interface Budget {
  /** The number of programs that share it, such as the nodes of a DaemonSet. 100 by default. */
  readonly clients?: number;
  /** The reads that all of them together start in a second. 10 by default. */
  readonly rate?: number;
}

/** @internal The time in which each client may start one read. */
export function windowMs(budget: Budget): number {
  return Math.min(((budget.clients ?? 100) / (budget.rate ?? 10)) * 1_000, WINDOW_MS_MAX);
}

/** @internal The budget in an answer. Undefined without one, and if a member is wrong. */
export function parseBudget(value: string | null): Budget | undefined {
  const members = new Map<string, string>();
  for (const member of (value ?? "").split(",")) {
    const [name = "", text = ""] = (member.split(";")[0] ?? "").trim().split("=", 2);
    members.set(name, text);
  }
  const clients = members.get("clients") ?? "";
  const rate = members.get("rate") ?? "";
  if (!/^[0-9]{1,9}$/.test(clients) || !/^[0-9]{1,9}(\.[0-9]*)?$/.test(rate)) {
    return undefined;
  }
  const found = { clients: Number(clients), rate: Number(rate) };
  return found.clients >= 1 && found.rate > 0 ? found : undefined;
}

/**
 * What the end of a call says about kubefan.
 *
 * - `answered`: kubefan has answered, or the error is not about it.
 * - `away`: kubefan cannot be reached.
 * - `busy`: kubefan asks to come back later.
 * - `busyForLong`: it has asked so for a while. Its health decides whether it is away.
 * - `refused`: kubefan has no answer for this read, and the apiserver may have one.
 */
export type Verdict = "answered" | "away" | "busy" | "busyForLong" | "refused";

const REFUSED: ReadonlySet<string> = new Set([
  ErrorReason.UPSTREAM_FORBIDDEN,
  ErrorReason.NOT_CACHED,
  ErrorReason.PASSTHROUGH,
]);
const BUSY: ReadonlySet<string> = new Set([
  ErrorReason.NOT_SYNCED,
  ErrorReason.STALE,
  ErrorReason.UPSTREAM_UNAVAILABLE,
  ErrorReason.STOPPED,
  ErrorReason.LIMIT_REACHED,
]);

/** What an error says about kubefan; undefined is an answer. */
export function verdictOf(error: KubefanError | undefined): Verdict {
  const isAnswer =
    error === undefined ||
    error instanceof ProtocolError ||
    error instanceof Expired ||
    error instanceof Undecodable ||
    error instanceof InvalidAddress;
  if (isAnswer) {
    return "answered";
  }
  if (REFUSED.has(error.reason)) {
    return "refused";
  }
  if (BUSY.has(error.reason)) {
    return "busy";
  }
  if (error.reason !== "") {
    return "answered";
  }
  if (error.retryAfterMs !== undefined) {
    return "busy";
  }
  return error.isRetryable && error.code !== "DATA_LOSS" ? "away" : "answered";
}

/**
 * A row of answers to reads of one kind that ask to come back later. Each kind has its own: one
 * cache that never gets ready says nothing about the others.
 */
export class BusyRow {
  #since = -Infinity;
  #at = -Infinity;

  /** Notes such an answer. Whether there was no other one for a while. */
  lasts(now: number): boolean {
    // Messages of open streams are no answers here, so only time can end an old row.
    if (now - this.#at > BUSY_PAUSE_MS_MAX) {
      this.#since = now;
    }
    this.#at = now;
    return now - this.#since >= BUSY_MS_MAX;
  }
}

/** Decides where reads go, without a clock of its own. Times are in milliseconds. */
export class Machine {
  side: Side = Side.HEALTHY;
  /** The number of outages, so that an old failure does not begin a new one. */
  epoch = 0;
  #returnedAt = -Infinity;
  #healthySince = 0;
  /** Probes must be answered for this long in this outage. 0: one is enough. */
  #hold = 0;

  /** A request that was sent in this epoch found no kubefan. */
  failed(now: number, epoch: number): void {
    if (this.side !== Side.HEALTHY || epoch !== this.epoch) {
      return;
    }
    if (now - this.#returnedAt >= 2 * Math.max(this.#hold, HOLD_MS_MIN)) {
      this.#hold = 0;
    } else {
      this.#hold = this.#hold === 0 ? HOLD_MS_MIN : Math.min(2 * this.#hold, HOLD_MS_MAX);
    }
    this.side = Side.AWAY;
    this.epoch++;
  }

  /** A read was started at the apiserver, and should not move again soon. */
  moved(): void {
    if (this.side !== Side.HEALTHY) {
      this.#hold = Math.max(this.#hold, HOLD_MS_MIN);
    }
  }

  /** A probe has ended. */
  probed(now: number, isHealthy: boolean): void {
    if (this.side === Side.HEALTHY) {
      return;
    }
    if (!isHealthy) {
      this.side = Side.AWAY;
      return;
    }
    if (this.side === Side.AWAY) {
      this.side = Side.RETURNING;
      this.#healthySince = now;
    }
    if (now - this.#healthySince >= this.#hold) {
      this.side = Side.HEALTHY;
      this.#returnedAt = now;
    }
  }
}

/** The time, in milliseconds. */
export interface Clock {
  now(): number;
  /** Runs a function after a time, unless the returned one is called before. */
  callLater(ms: number, run: () => void): () => void;
}

/** The system's time. */
export const REAL_CLOCK: Clock = {
  now: () => performance.now(),
  callLater: (ms, run) => {
    const timer = setTimeout(run, Math.max(0, ms));
    return () => {
      clearTimeout(timer);
    };
  },
};

interface Start {
  /** The time until which reads of callers without a state go first. */
  readonly overtakenUntil: number;
  readonly admitted: () => void;
}

/**
 * Spaces the reads that a client starts at the apiserver while kubefan is away.
 *
 * The hazard is a fleet whose clients all turn to the apiserver at once: it would make one outage
 * into two. So each client has one start in each window, and the first window begins at a random
 * moment. A read whose caller has a state waits for one window more, so that those without a state
 * go first, in the whole fleet and in each client. After two windows they take turns.
 */
export class Gate {
  readonly #clock: Clock;
  readonly #random: () => number;
  #budget: Budget;
  /** The largest number of clients that kubefan told. */
  #toldClients = 0;
  /** The time since which it told only smaller ones. */
  #smallerSince: number | undefined;
  #next = -Infinity;
  /** The first start for a caller with a state. */
  #laterFrom = -Infinity;
  readonly #first: Start[] = [];
  readonly #later: Start[] = [];
  /** The last start was one with a state. */
  #wasLater = false;
  #due: number | undefined;
  #cancel: () => void = () => undefined;

  constructor(clock: Clock, budget: Budget, random: () => number = Math.random) {
    this.#clock = clock;
    this.#budget = budget;
    this.#random = random;
  }

  /** Takes the budget that kubefan tells. Starts that wait keep their moment. */
  setBudget(budget: Budget): void {
    const now = this.#clock.now();
    const clients = budget.clients ?? 0;
    const since = this.#smallerSince ?? now;
    if (clients < this.#toldClients && now < since + CLIENTS_KEPT_MS) {
      this.#smallerSince = since;
      budget = { ...budget, clients: this.#toldClients };
    } else {
      this.#toldClients = clients;
      this.#smallerSince = undefined;
    }
    this.#budget = budget;
  }

  /** Calls `admitted` at the moment of a start, unless the returned function is called before. */
  enter(hasState: boolean, admitted: () => void): () => void {
    const now = this.#clock.now();
    const window = windowMs(this.#budget);
    const start = { admitted, overtakenUntil: now + 2 * window };
    if (this.#first.length + this.#later.length === 0 && now >= this.#next) {
      this.#next = now + this.#random() * window;
      this.#laterFrom = this.#next + window;
    }
    (hasState ? this.#later : this.#first).push(start);
    this.#arm();
    return () => {
      for (const waiting of [this.#first, this.#later]) {
        const at = waiting.indexOf(start);
        if (at >= 0) {
          waiting.splice(at, 1);
        }
      }
      this.#arm();
    };
  }

  #arm(): void {
    let due: number | undefined;
    if (this.#first.length > 0) {
      due = this.#next;
    } else if (this.#later.length > 0) {
      due = Math.max(this.#next, this.#laterFrom);
    }
    if (due === this.#due) {
      return;
    }
    this.#cancel();
    this.#due = due;
    if (due !== undefined) {
      this.#cancel = this.#clock.callLater(due - this.#clock.now(), () => {
        this.#admit();
      });
    }
  }

  #admit(): void {
    this.#due = undefined;
    const now = this.#clock.now();
    const overtakenUntil = this.#later[0]?.overtakenUntil ?? Infinity;
    const isOverdue = now >= Math.max(this.#laterFrom, overtakenUntil) && !this.#wasLater;
    this.#wasLater = isOverdue || this.#first.length === 0;
    const start = (this.#wasLater ? this.#later : this.#first).shift();
    // Not from `due`: a start that came late would be followed by the next one at once.
    this.#next = now + windowMs(this.#budget);
    this.#arm();
    start?.admitted();
  }
}

/** What a monitor needs of its client. */
export interface MonitorSettings {
  readonly clock: Clock;
  /** Asks kubefan for its health. */
  readonly probe: () => Promise<boolean>;
  readonly onSide: (side: Side, reason: string) => void;
  readonly random?: () => number;
}

/** Has the state of kubefan, and probes it while it is away. */
export class Monitor {
  readonly #settings: MonitorSettings;
  readonly #random: () => number;
  readonly #machine = new Machine();
  readonly #listeners = new Set<() => void>();
  #cancel: () => void = () => undefined;
  #isProbing = false;
  #isClosed = false;
  /** The question about kubefan's health that has no answer yet. */
  #asked: Promise<boolean> | undefined;

  constructor(settings: MonitorSettings) {
    this.#settings = settings;
    this.#random = settings.random ?? Math.random;
  }

  get isHealthy(): boolean {
    return this.#machine.side === Side.HEALTHY;
  }

  /** The number of outages. */
  get epoch(): number {
    return this.#machine.epoch;
  }

  /** Lets the machine take a step, and makes a change known. */
  note(reason: string, step: (machine: Machine, now: number) => void): void {
    const before = this.#machine.side;
    step(this.#machine, this.#settings.clock.now());
    const after: Side = this.#machine.side;
    this.#arm();
    if ((before === Side.HEALTHY) !== (after === Side.HEALTHY)) {
      for (const listener of [...this.#listeners]) {
        listener();
      }
    }
    if (before !== after) {
      this.#settings.onSide(after, reason);
    }
  }

  /** Calls a function whenever reads go to another server, until the returned one is called. */
  listen(listener: () => void): () => void {
    this.#listeners.add(listener);
    return () => {
      this.#listeners.delete(listener);
    };
  }

  /**
   * Calls `leave` at a random moment after a return of kubefan, if it is healthy then. The returned
   * function ends the wait.
   */
  awaitReturn(leave: () => void): () => void {
    let stop = (): void => undefined;
    const changed = (): void => {
      stop();
      stop = (): void => undefined;
      if (this.isHealthy) {
        const after = RETURN_MS_MIN + this.#random() * (RETURN_MS_MAX - RETURN_MS_MIN);
        stop = this.#settings.clock.callLater(after, () => {
          if (this.isHealthy) {
            leave();
          }
        });
      }
    };
    const forget = this.listen(changed);
    changed();
    return () => {
      forget();
      stop();
    };
  }

  /** Asks kubefan for its health, once for all that want to know at the same time. */
  isServing(): Promise<boolean> {
    this.#asked ??= this.#settings.probe().finally(() => {
      this.#asked = undefined;
    });
    return this.#asked;
  }

  /** Ends the probes. */
  close(): void {
    this.#isClosed = true;
    this.#cancel();
  }

  #arm(): void {
    if (this.isHealthy || this.#isProbing || this.#isClosed) {
      return;
    }
    this.#isProbing = true;
    const after = PROBE_MS * (0.75 + this.#random() / 2);
    this.#cancel = this.#settings.clock.callLater(after, () => {
      void this.#probe();
    });
  }

  async #probe(): Promise<void> {
    const isHealthy = await this.isServing();
    this.note(`kubefan's health is ${isHealthy ? "" : "not "}SERVING`, (machine, now) => {
      this.#isProbing = false;
      machine.probed(now, isHealthy);
    });
  }
}
