// The state that all reads of a client share which may go to the apiserver.

import type { Apiserver, ApiserverRead } from "./apiserver.js";
import type { KubefanError } from "./errors.js";
import {
  BUDGET_KEY,
  BusyRow,
  Gate,
  Monitor,
  Side,
  parseBudget,
  verdictOf,
  type Budget,
  type Clock,
  type Verdict,
} from "./fallback.js";
import type { Resource } from "./items.js";
import type { Projection, TargetOptions } from "./options.js";

/** Settings of the fallback of a client. */
export interface FallbackSettings {
  readonly address: string;
  readonly apiserver: Apiserver;
  readonly budget: Budget;
  readonly clock: Clock;
  readonly probe: () => Promise<boolean>;
  readonly onSide?: ((side: Side, reason: string) => void) | undefined;
  readonly onStart?: ((waitedMs: number) => void) | undefined;
}

/** A wait for a start. */
export interface StartWait {
  readonly hasState: boolean;
  /** The wait ends when kubefan returns: false for a read that kubefan has no answer for. */
  readonly isForKubefan: boolean;
  readonly signal: AbortSignal;
}

/** Says where a read goes, and when. */
export class FallbackReads {
  readonly apiserver: Apiserver;
  readonly clock: Clock;
  readonly monitor: Monitor;
  readonly #gate: Gate;
  readonly #settings: FallbackSettings;
  readonly #resolved = new Map<string, Resource>();
  readonly #busy = new Map<string, BusyRow>();
  #side: Side = Side.HEALTHY;

  constructor(settings: FallbackSettings) {
    this.#settings = settings;
    this.apiserver = settings.apiserver;
    this.clock = settings.clock;
    this.#gate = new Gate(settings.clock, settings.budget);
    this.monitor = new Monitor({
      clock: settings.clock,
      probe: settings.probe,
      onSide: (side, reason) => {
        this.#changed(side, reason);
      },
    });
  }

  /**
   * Notes the outcome of a call to kubefan that was made in this epoch. After `busyForLong` the
   * caller asks `judge`.
   */
  note(error: KubefanError | undefined, epoch: number, kind: string): Verdict {
    const verdict = verdictOf(error);
    if (verdict !== "busy") {
      this.#busy.delete(kind);
    } else {
      const row = this.#busy.get(kind) ?? new BusyRow();
      this.#busy.set(kind, row);
      if (row.lasts(this.clock.now())) {
        return "busyForLong";
      }
    }
    if (verdict === "away") {
      this.#failed(error?.message ?? "", epoch);
    }
    return verdict;
  }

  /** Decides about a kubefan that is busy for long, by its health. */
  async judge(error: KubefanError, epoch: number): Promise<Verdict> {
    if (await this.monitor.isServing()) {
      // One resource or one limit is no outage: the other reads stay.
      return "refused";
    }
    this.#failed(error.message, epoch);
    return "away";
  }

  /** Warns that one watch goes to the apiserver. */
  movesAlone(resource: string, error: KubefanError): void {
    const text = `kubefan at ${this.#settings.address} has no answer`;
    const problem = `a watch of ${resource} goes to the apiserver: ${error.message}`;
    process.emitWarning(`${text}: ${problem}`, "KubefanWarning");
  }

  /** Reads the budget that kubefan tells. */
  learn(headers: Headers): void {
    const budget = parseBudget(headers.get(BUDGET_KEY));
    if (budget !== undefined) {
      this.#gate.setBudget(budget);
    }
  }

  /** Remembers a resource that kubefan has resolved. */
  remember(resource: string, target: TargetOptions, resolved: Resource | undefined): void {
    if (resolved !== undefined && resolved.version !== "") {
      this.#resolved.set(keyOf(resource, target), resolved);
    }
  }

  /** The request to the apiserver. */
  read(
    resource: string,
    target: TargetOptions,
    projection: Projection,
    signal: AbortSignal,
  ): ApiserverRead {
    const resolved = this.#resolved.get(keyOf(resource, target));
    return { resource, target, projection, resolved, signal };
  }

  /** Waits for a start at the apiserver. False if kubefan is to be asked first, or at an abort. */
  async start(wait: StartWait): Promise<boolean> {
    const { hasState, isForKubefan, signal } = wait;
    const since = this.clock.now();
    if (signal.aborted || (isForKubefan && this.monitor.isHealthy)) {
      return false;
    }
    const isAdmitted = await new Promise<boolean>((resolve) => {
      const ends: (() => void)[] = [];
      const end = (admitted: boolean): void => {
        for (const each of ends.splice(0)) {
          each();
        }
        resolve(admitted);
      };
      const abort = (): void => {
        end(false);
      };
      signal.addEventListener("abort", abort, { once: true });
      ends.push(() => {
        signal.removeEventListener("abort", abort);
      });
      if (isForKubefan) {
        ends.push(this.monitor.listen(abort));
      }
      ends.push(
        this.#gate.enter(hasState, () => {
          end(true);
        }),
      );
    });
    if (isAdmitted) {
      this.monitor.note("", (machine) => {
        machine.moved();
      });
      this.#settings.onStart?.(this.clock.now() - since);
    }
    return isAdmitted;
  }

  /** Ends the probes. */
  close(): void {
    this.monitor.close();
  }

  #changed(side: Side, reason: string): void {
    const { address, onSide } = this.#settings;
    // One line for each change of the server, not for each change of the state.
    if ((this.#side === Side.HEALTHY) !== (side === Side.HEALTHY)) {
      const text =
        side === Side.HEALTHY
          ? `reads return to kubefan at ${address}`
          : `kubefan at ${address} is away: reads go to the apiserver: ${reason}`;
      process.emitWarning(text, "KubefanWarning");
    }
    this.#side = side;
    try {
      onSide?.(side, reason);
    } catch (error) {
      // A mistake there must not end a read, or the process.
      process.emitWarning(`onSide has failed: ${String(error)}`, "KubefanWarning");
    }
  }

  #failed(reason: string, epoch: number): void {
    this.monitor.note(reason, (machine, now) => {
      machine.failed(now, epoch);
    });
  }
}

/** The method and the resource of a call, whose busy answers count together. */
export function kindOf(method: string, resource: string, target: TargetOptions): string {
  return `${method} ${keyOf(resource, target)}`;
}

function keyOf(resource: string, target: TargetOptions): string {
  return [target.group ?? "", target.version ?? "", resource].join("/");
}
