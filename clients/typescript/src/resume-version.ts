// Versions to resume from, as texts.
//
// On the wire a version and whether all events of it were sent are two fields. The client keeps
// both as one text.

/** The place after all events of a version. */
const END = ".end";

/** A version on the wire. */
export interface SentVersion {
  readonly version: string;
  /** Whether all events of it were received. Missing without a version. */
  readonly isComplete?: boolean;
}

/** The text of a version that was received. */
export function receivedVersion(version: string, isComplete: boolean): string {
  return isComplete && version !== "" ? version + END : version;
}

/** A version as it is sent. */
export function sentVersion(text: string): SentVersion {
  if (text === "") {
    return { version: "" };
  }
  const isComplete = text.endsWith(END);
  return { version: isComplete ? text.slice(0, -END.length) : text, isComplete };
}
