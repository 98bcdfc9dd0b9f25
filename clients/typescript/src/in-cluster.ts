// Settings with which a pod of the cluster connects.

import type { ClientOptions } from "./endpoint.js";

/**
 * kubefan's Service for gRPC clients, as docs/install.md makes it: the name has an address for each
 * replica, and the client chooses.
 */
export const IN_CLUSTER_ADDRESS = "https://kubefan-headless.kubefan.svc:7443";
/** Path at which a pod mounts `ca.crt` of the ConfigMap `kubefan-ca`. */
const CA_FILE = "/etc/kubefan/ca.crt";
/** Path of the service account's token in every pod. The kubelet renews it. */
const TOKEN_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/** The options of a client in a pod: the pod's token, and kubefan's CA. Those given count more. */
export function inClusterOptions(options: ClientOptions = {}): ClientOptions {
  return { caFile: CA_FILE, tokenFile: TOKEN_FILE, ...options };
}
