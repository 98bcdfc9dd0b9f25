# shellcheck shell=bash
# Shared by the scenarios: sourced by each, after `set -euo pipefail`. A scenario begins with a cluster
# in which nothing of an earlier one is left. It ends with 0 if its promise holds, and says otherwise
# what was seen.
# shellcheck disable=SC2034 # the scenarios use its variables
# shellcheck source=../lib.sh # as seen from a scenario
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Where the scenario writes what it needs.
work=$state/scenarios/$script
rm -rf "$work"
mkdir -p "$work"
# The commands of the pages find these.
mkdir -p "$work/bin"
ln -s "$(test_asset kubectl)" "$(test_asset helm)" "$work/bin/"
ln -s "$(realpath "$(kubefan_binary)")" "$work/bin/kubefan"

# The latest that an event may come, after it came directly.
LATE_MAX=5s
# The pods of the chart's Deployment.
REPLICAS=app.kubernetes.io/component=cluster
# The pods of its DaemonSet.
NODES=app.kubernetes.io/component=node
# Flags of helm, with which pods of nodes read over gRPC: values.yaml names protobuf, which they cannot
# read so (docs/deployments/node.md).
JSON_ALONE=(--set "resources[2].encoding=json")
# A scenario is stopped by `run` after its time; no wait of it is longer.
WAIT_SECONDS=90

step() { printf -- '-- %s: %s\n' "$(date --utc +%T)" "$*"; }

# on_exit COMMAND…: runs a command at the end of the scenario too.
at_exit=()
on_exit() { at_exit+=("$*"); }
leave() {
    local status=$? command
    [ $status = 0 ] || [ $status = "$CANNOT_RUN" ] || show_state
    for command in "${at_exit[@]}"; do eval "$command" || true; done
}
trap leave EXIT

# What one needs to see after a failure.
show_state() {
    {
        kubectl get nodes,pods --all-namespaces --output wide
        kubectl get events --all-namespaces --sort-by .lastTimestamp --field-selector type!=Normal | tail -20
    } >"$work/state.txt" 2>&1 || true
    local pod
    for pod in $(kubectl --namespace agents get pods --output name); do
        kubectl --namespace agents logs "$pod" --timestamps=false >"$work/${pod#pod/}.log" 2>&1 || true
    done
    for pod in $(kubectl --namespace kubefan get pods --output name); do
        kubectl --namespace kubefan logs "$pod" --tail -1 >"$work/${pod#pod/}.log" 2>&1 || true
    done
    printf 'the state of the cluster: %s\n' "$work/state.txt"
}

# install_kubefan [FLAG…]: installs the chart with flags of helm, and waits until it is available.
# shellcheck disable=SC2120
install_kubefan() {
    make_namespaces
    helm install kubefan "$chart" --namespace kubefan --values "$cluster/values.yaml" "$@" >/dev/null
    rolled_out deployment/kubefan
}

make_namespaces() {
    local namespace
    for namespace in kubefan agents shop; do kubectl create namespace "$namespace" >/dev/null; done
    kubectl label namespace kubefan pod-security.kubernetes.io/enforce=restricted >/dev/null
}

# rolled_out OBJECT [NAMESPACE]
rolled_out() { kubectl --namespace "${2:-kubefan}" rollout status "$1" --timeout "${WAIT_SECONDS}s" | tail -1; }

# start_shop: pods and a Service, for the agents to see.
start_shop() {
    kubectl --namespace shop create deployment web --image "$registry/busybox:1" --replicas 4 -- /bin/sleep infinity >/dev/null
    kubectl --namespace shop patch deployment web --patch '{"spec":{"template":{"spec":{"terminationGracePeriodSeconds":0}}}}' >/dev/null
    kubectl --namespace shop create service clusterip web --tcp 80:80 >/dev/null
    rolled_out deployment/web shop
}

# The objects that agents compare, with what a pod may be read as besides JSON.
AGENTS_COMPARE_JSON="pods services configmaps endpointslices"
AGENTS_COMPARE="-protobuf=pods $AGENTS_COMPARE_JSON"

# agents NAME HOST_NETWORK PORT CA ARGUMENT…: an agent on each node, which compares what it sees directly
# and through kubefan. CA is the ConfigMap with kubefan's.
agents() {
    local name=$1 host_network=$2 port=$3 ca=$4
    shift 4
    sed -e "s/#NAME/$name/; s/#HOST_NETWORK/$host_network/; s/#PORT/$port/; s/#CA/$ca/; s|#ARGUMENTS|$(printf ', "%s"' "$@")|" "$cluster/agents.yaml" |
        kubectl apply --filename - >/dev/null
    rolled_out "daemonset/$name" agents
}
# shellcheck disable=SC2086 # several arguments
start_agents() { agents agent false 8080 kubefan-ca $AGENTS_COMPARE; }
# In the network of the nodes.
# shellcheck disable=SC2086
start_host_agents() { agents host-agent true 8081 kubefan-ca $AGENTS_COMPARE; }

# agent COMMAND…: the tool of the scenarios, as administrator.
agent() { inside "$programs/agent" "$@"; }

# compare_agents [FLAG…]: fails if events were lost, repeated, reordered or late. Flags: agent collect --help
compare_agents() {
    printf '%s: ' "$(date --utc +%T)"
    agent collect --late "$LATE_MAX" "$@"
}

# in_background LOG COMMAND…: starts a command in the network of the control plane, which ends with the
# scenario. Sets `started` to its process: a function in the background would be another one.
started=
in_background() {
    local log=$1
    shift
    ip netns exec "$netns" "$@" >"$log" 2>&1 &
    started=$!
    on_exit "kill $started 2>/dev/null"
}

# start_writes: changes ConfigMaps and pods of the shop until stop_writes
writer=
start_writes() {
    in_background "$work/writes.log" "$programs/agent" write --for 5m
    writer=$started
}
stop_writes() {
    kill "$writer" 2>/dev/null || true
    wait "$writer" || true
    tail -1 "$work/writes.log"
}

# pods_of SELECTOR: the names of kubefan's pods that are not ending
pods_of() {
    kubectl --namespace kubefan get pods --selector "$1" \
        --output go-template='{{range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}'
}

# pods_ended SELECTOR: waits until the pods that are ending have drained
pods_ended() {
    within "$WAIT_SECONDS" "the old pods have ended" no_pod_is_ending "$1"
}
no_pod_is_ending() {
    [ "$(pods_of "$1" | wc -l)" = "$(kubectl --namespace kubefan get pods --selector "$1" --output name | wc -l)" ]
}

# pod_metric ADDRESS NODE NAME: a metric of a pod of kubefan, summed over its labels. A policy lets only the
# node of the pod in.
pod_metric() {
    on_node "$2" curl --silent --fail --max-time 2 "http://$1:7444/metrics" </dev/null |
        awk -v name="$3" '$1 ~ "^" name "([{]|$)" { sum += $2 } END { print sum + 0 }'
}

# assert_warm_starts SELECTOR: each pod took the caches of JSON over from another one. Those of protobuf
# always begin with a list.
assert_warm_starts() {
    local pod
    for pod in $(pods_of "$1"); do
        kubectl --namespace kubefan logs "$pod" --tail -1 >"$work/$pod.log"
        ! grep '"cold start"' "$work/$pod.log" || fail "these caches of $pod began with a list"
        grep -q '"warm start"' "$work/$pod.log" || fail "$pod has no warm start in its log"
    done
}
