// Parts of a JSON text, as they are in it: no number is rounded, and no field changes its place.

import type { Projection } from "./options.js";

const LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration";

/** A field of an object: its name, and the texts of the name and the value. */
interface Field {
  readonly name: string;
  readonly nameText: string;
  readonly value: string;
}

/** The position after a string that begins at `at`. */
function endOfString(text: string, at: number): number {
  for (let end = at + 1; end < text.length; end++) {
    const char = text[end];
    if (char === "\\") {
      end++;
    } else if (char === '"') {
      return end + 1;
    }
  }
  throw new SyntaxError("a JSON text that ends in a string");
}

/** The position after a value that begins at `at`. */
function endOfValue(text: string, at: number): number {
  if (text[at] === '"') {
    return endOfString(text, at);
  }
  let depth = 0;
  for (let end = at; end < text.length; ) {
    const char = text[end] ?? "";
    if (char === '"') {
      end = endOfString(text, end);
      continue;
    }
    if (char === "{" || char === "[") {
      depth++;
    } else if (char === "}" || char === "]") {
      depth--;
      if (depth <= 0) {
        return depth < 0 ? end : end + 1;
      }
    } else if (depth === 0 && (char === "," || /\s/.test(char))) {
      return end;
    }
    end++;
  }
  return text.length;
}

function skipSpace(text: string, at: number): number {
  let end = at;
  while (end < text.length && /\s/.test(text[end] ?? "")) {
    end++;
  }
  return end;
}

/** The fields of an object, in their order; undefined if the text is no object. */
export function fieldsOf(text: string): Field[] | undefined {
  let at = skipSpace(text, 0);
  if (text[at] !== "{") {
    return undefined;
  }
  const fields: Field[] = [];
  at = skipSpace(text, at + 1);
  while (text[at] === '"') {
    const nameEnd = endOfString(text, at);
    const nameText = text.slice(at, nameEnd);
    const begin = skipSpace(text, skipSpace(text, nameEnd) + 1);
    const end = endOfValue(text, begin);
    const name = JSON.parse(nameText) as string;
    fields.push({ name, nameText, value: text.slice(begin, end) });
    at = skipSpace(text, end);
    if (text[at] === ",") {
      at = skipSpace(text, at + 1);
    }
  }
  return fields;
}

/** The elements of a list; undefined if the text is no list. */
export function itemsOf(text: string): string[] | undefined {
  let at = skipSpace(text, 0);
  if (text[at] !== "[") {
    return undefined;
  }
  const items: string[] = [];
  at = skipSpace(text, at + 1);
  while (at < text.length && text[at] !== "]") {
    const end = endOfValue(text, at);
    items.push(text.slice(at, end));
    at = skipSpace(text, end);
    if (text[at] === ",") {
      at = skipSpace(text, at + 1);
    }
  }
  return items;
}

function objectOf(fields: readonly Field[]): string {
  return `{${fields.map(({ nameText, value }) => `${nameText}:${value}`).join(",")}}`;
}

/** Replaces the value of a field, or leaves it out if the function returns undefined. */
function changed(
  text: string,
  name: string,
  change: (value: string) => string | undefined,
): string {
  const fields = fieldsOf(text);
  if (fields === undefined) {
    return text;
  }
  const kept = fields.flatMap((field) => {
    const value = field.name === name ? change(field.value) : field.value;
    return value === undefined ? [] : [{ ...field, value }];
  });
  return objectOf(kept);
}

/** Gives an item of a list the kind that it has in a watch: a list leaves it out. */
export function withKind(item: string, kind: string, apiVersion: string): string {
  const fields = fieldsOf(item) ?? [];
  if (kind === "" || fields.some(({ name, value }) => name === "kind" && value !== '""')) {
    return item;
  }
  const added = [
    { name: "kind", nameText: '"kind"', value: JSON.stringify(kind) },
    { name: "apiVersion", nameText: '"apiVersion"', value: JSON.stringify(apiVersion) },
  ];
  return objectOf([...added, ...fields]);
}

/** Leaves out of an object what kubefan would leave out. */
export function project(text: string, projection: Projection): string {
  const left = changed(text, "metadata", (metadata) => {
    let kept = changed(metadata, "resourceVersion", () => undefined);
    kept = changed(kept, "managedFields", () => undefined);
    if (projection.dropLastApplied !== true) {
      return kept;
    }
    return changed(kept, "annotations", (annotations) => {
      const others = changed(annotations, LAST_APPLIED, () => undefined);
      return others === "{}" ? undefined : others;
    });
  });
  if (projection.paths === undefined || projection.paths.length === 0) {
    return left;
  }
  const mask: Mask = new Map();
  for (const path of projection.paths) {
    add(mask, namesOf(path));
  }
  return pick(left, mask) ?? "{}";
}

/** The fields to keep, with those below them; undefined keeps all of them. */
type Mask = Map<string, Mask | undefined>;

function add(mask: Mask, names: readonly string[]): void {
  const [first = "", ...rest] = names;
  if (rest.length === 0) {
    mask.set(first, undefined);
    return;
  }
  if (mask.has(first) && mask.get(first) === undefined) {
    // A shorter path keeps all of it.
    return;
  }
  const below = mask.get(first) ?? new Map<string, Mask | undefined>();
  mask.set(first, below);
  add(below, rest);
}

/** What the mask keeps of a value; undefined for nothing. */
function pick(text: string, mask: Mask | undefined): string | undefined {
  if (mask === undefined) {
    return text;
  }
  const items = itemsOf(text);
  if (items !== undefined) {
    // An object with nothing to keep stays as an empty one.
    const objects = items.filter((item) => item.startsWith("{"));
    const kept = objects.map((item) => pick(item, mask) ?? "{}");
    return kept.length === 0 ? undefined : `[${kept.join(",")}]`;
  }
  const kept = (fieldsOf(text) ?? []).flatMap((field) => {
    const value = mask.has(field.name) ? pick(field.value, mask.get(field.name)) : undefined;
    return value === undefined ? [] : [{ ...field, value }];
  });
  return kept.length === 0 ? undefined : objectOf(kept);
}

/** Splits a path at its dots. A backslash makes a dot or a backslash part of a name. */
export function namesOf(path: string): string[] {
  const names: string[] = [];
  let name = "";
  for (let at = 0; at < path.length; at++) {
    let char = path[at] ?? "";
    if (char === ".") {
      names.push(name);
      name = "";
      continue;
    }
    if (char === "\\") {
      char = path[++at] ?? "";
      if (char !== "." && char !== "\\") {
        throw new TypeError(`"${path}" is no path of fields, such as "spec.nodeName"`);
      }
    }
    name += char;
  }
  names.push(name);
  if (names.includes("")) {
    throw new TypeError(`"${path}" is no path of fields, such as "spec.nodeName"`);
  }
  return names;
}
