// The path of a resource by its name.

import type { Resource } from "./items.js";
import type { TargetOptions } from "./options.js";

/**
 * Resources of each cluster that need no discovery: a program that starts while kubefan is away
 * reads most often one of them.
 */
const BUILT_IN: Readonly<Record<string, string>> = {
  "/v1":
    "configmaps endpoints events limitranges persistentvolumeclaims pods " +
    "replicationcontrollers resourcequotas secrets serviceaccounts services",
  "apps/v1": "controllerrevisions daemonsets deployments replicasets statefulsets",
  "batch/v1": "cronjobs jobs",
  "coordination.k8s.io/v1": "leases",
  "discovery.k8s.io/v1": "endpointslices",
  "networking.k8s.io/v1": "ingresses networkpolicies",
  "policy/v1": "poddisruptionbudgets",
};
/** Those that are not in namespaces. */
const BUILT_IN_OF_CLUSTER: Readonly<Record<string, string>> = {
  "/v1": "namespaces nodes persistentvolumes",
  "storage.k8s.io/v1": "csidrivers csinodes storageclasses volumeattachments",
};

/** A resource that needs no discovery. */
export function knownResource(name: string, target: TargetOptions): Resource | undefined {
  const { group = "", version = "" } = target;
  if (version !== "") {
    return { group, version, resource: name, kind: "", namespaced: true };
  }
  const [resource, of] = split(group === "" ? name : `${name}.${group}`);
  const tables = [
    { table: BUILT_IN, namespaced: true },
    { table: BUILT_IN_OF_CLUSTER, namespaced: false },
  ];
  for (const { table, namespaced } of tables) {
    for (const [path, resources] of Object.entries(table)) {
      const [inGroup = "", inVersion = ""] = path.split("/");
      if (inGroup === of && resources.split(" ").includes(resource)) {
        return { group: of, version: inVersion, resource, kind: "", namespaced };
      }
    }
  }
  return undefined;
}

function split(name: string): [resource: string, rest: string] {
  const lower = name.toLowerCase();
  const at = lower.indexOf(".");
  return at < 0 ? [lower, ""] : [lower.slice(0, at), lower.slice(at + 1)];
}

/** The part of an `APIGroupDiscoveryList` that is used. */
interface Groups {
  readonly items?: readonly {
    readonly metadata?: { readonly name?: string };
    readonly versions?: readonly {
      readonly version: string;
      readonly resources?: readonly {
        readonly resource: string;
        readonly responseKind?: { readonly kind?: string };
        readonly scope?: string;
        readonly singularResource?: string;
        readonly shortNames?: readonly string[];
      }[];
    }[];
  }[];
}

/**
 * The resource with this name, or else with this short name. The rest of the name is a group, the
 * beginning of one, or a version and a group.
 */
export function findResource(text: string, name: string): Resource | undefined {
  const groups = JSON.parse(text) as Groups;
  const [wanted, rest] = split(name);
  let short: Resource | undefined;
  for (const { metadata, versions = [] } of groups.items ?? []) {
    const group = metadata?.name ?? "";
    for (const { version, resources = [] } of versions) {
      if (rest !== "" && !group.startsWith(rest) && rest !== `${version}.${group}`) {
        continue;
      }
      for (const { resource, responseKind, scope, singularResource, shortNames } of resources) {
        const namespaced = scope !== "Cluster";
        const found = { group, version, resource, kind: responseKind?.kind ?? "", namespaced };
        if (wanted === resource || wanted === singularResource) {
          return found;
        }
        if (shortNames?.includes(wanted) === true) {
          short ??= found;
        }
      }
    }
  }
  return short;
}
