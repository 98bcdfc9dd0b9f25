# shellcheck shell=bash
# The node form is switched on and off under clients. Sourced by scenarios after scenario.sh.
# shellcheck source=../pages.sh # as seen from a scenario
. "$cluster/pages.sh"

# play_node_form SERVER RELISTS [FLAG…]: with flags of helm, with which pods of nodes read at SERVER. A client
# may list RELISTS times more.
play_node_form() {
    local server=$1 relists=$2
    shift 2
    install_kubefan "$@"
    start_shop
    start_agents
    start_writes

    step "cluster form to node form"
    helm upgrade kubefan "$chart" --namespace kubefan --reuse-values --set node.enabled=true >/dev/null
    rolled_out deployment/kubefan
    rolled_out daemonset/kubefan-node
    pods_ended "$REPLICAS"
    # Before the agents begin again, because they would forget what they have seen. A replica that has begun
    # again knows no state of an older version for a selector, so client-go may list.
    compare_agents --min-events 100 --relists "$relists"
    assert_nodes_read_at "$server"
    run_page deployments/node.md Verify

    step "agents that begin now read through the pods of their nodes"
    kubectl --namespace agents rollout restart daemonset/agent >/dev/null
    rolled_out daemonset/agent agents
    # client-go lists again after a watch that ended in its first second, or that was passed on to a replica
    # that ends.
    sleep 10
    compare_agents --min-events 100 --relists "$relists"

    step "node form to cluster form"
    helm upgrade kubefan "$chart" --namespace kubefan --reuse-values --set node.enabled=false >/dev/null
    rolled_out deployment/kubefan
    pods_ended app.kubernetes.io/name=kubefan
    stop_writes
    compare_agents --min-events 300 --relists "$relists"
}

# assert_nodes_read_at SERVER: the pods of nodes list and watch there
assert_nodes_read_at() {
    local pod
    for pod in $(pods_of "$NODES"); do
        kubectl --namespace kubefan logs "$pod" --tail -1 >"$work/$pod.log"
        grep -qF "\"lists_and_watches_at\":\"$1" "$work/$pod.log" || fail "$pod does not read at $1"
    done
    echo "the pods of nodes read at $1"
}
