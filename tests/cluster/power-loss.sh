# shellcheck shell=bash
# A node loses its power, and boots. Sourced by scenarios after scenario.sh.

# lose_power NAMESPACE READERS [FLAG…]: of the node of a replica that serves pods with the label READERS on
# other nodes. Flags are those of compare_agents.
lose_power() {
    local namespace=$1 readers=$2 replica node
    shift 2
    read -r replica node <<<"$(most_used_replica "$namespace" "$readers")"
    [ -n "$node" ] || fail "no replica serves $readers of another node"
    # Without the node form the clients themselves look names up.
    [ "$namespace" = agents ] || dns_alone_on "$node"
    start_writes

    step "power loss of $node, whose replica $replica serves $readers elsewhere"
    "$cluster/node" stop "$node"
    on_exit "[ -f '$state/$node/pid' ] || '$cluster/node' start $node"
    within "$WAIT_SECONDS" "Kubernetes notices it" kubectl wait "node/$node" --for=condition=Ready=Unknown --timeout=1s
    compare_agents --except-node "$node" --min-events 200 --relists 2 "$@"

    step "boot of $node"
    "$cluster/node" start "$node"
    within "$WAIT_SECONDS" "$node is ready" kubectl wait "node/$node" --for=condition=Ready --timeout=1s
    rolled_out daemonset/agent agents
    rolled_out deployment/kubefan
    [ "$namespace" = agents ] || rolled_out daemonset/kubefan-node
    # Its agent needs some events of each resource, and the Service changes once a second.
    sleep 5
    stop_writes
    compare_agents --booted-node "$node" --min-events 500 --relists 2 "$@"
}

# dns_alone_on NODE: the DNS server is lost together with the node, so no name can be looked up then. Of two
# servers, each look-up would find the dead one by chance.
dns_alone_on() {
    step "the DNS server runs on $1 alone"
    scale_dns 1 "\"$1\""
    on_exit "scale_dns 2 null"
    rolled_out deployment/coredns kube-system
}
# scale_dns REPLICAS NODE: the latter is JSON
scale_dns() {
    kubectl --namespace kube-system patch deployment coredns \
        --patch '{"spec":{"replicas":'"$1"',"template":{"spec":{"nodeSelector":{"kubernetes.io/hostname":'"$2"'}}}}}' >/dev/null
}

# most_used_replica NAMESPACE READERS: the replica with the most readers on other nodes, and its node
most_used_replica() {
    local replica address node most=0 chosen='' readers
    while read -r replica address node; do
        readers=$(connected_to "$node" "$address" | grep -cxFf <(addresses_elsewhere "$1" "$2" "$node") || true)
        [ "$readers" -le "$most" ] || most=$readers chosen="$replica $node"
    done < <(kubectl --namespace kubefan get pods --selector "$REPLICAS" \
        --output jsonpath='{range .items[*]}{.metadata.name} {.status.podIP} {.spec.nodeName}{"\n"}{end}')
    printf '%s' "$chosen"
}

# addresses_elsewhere NAMESPACE SELECTOR NODE: the addresses of pods on other nodes
addresses_elsewhere() {
    kubectl --namespace "$1" get pods --selector "$2" --field-selector "spec.nodeName!=$3" \
        --output jsonpath='{range .items[*]}{.status.podIP}{"\n"}{end}'
}

# connected_to NODE ADDRESS: the addresses that are connected to port 7443 of a pod
connected_to() {
    # shellcheck disable=SC2016 # variables of the node's shell
    on_node "$1" bash -c '
        for pod in /run/netns/*; do
            nsenter --net="$pod" ss --no-header --tcp --numeric state established "sport = :7443"
        done' </dev/null | sed -E 's/\[?(::ffff:)?([0-9.]+)\]?:[0-9]+/\2/g' | awk -v address="$2" '$3 == address { print $4 }'
}
