# shellcheck shell=bash
# A node loses its power, and boots. Sourced by scenarios after scenario.sh.

# lose_power NAMESPACE READERS [FLAG…]: of the node of a replica that serves pods with the label READERS on
# other nodes. Flags are those of compare_agents.
lose_power() {
    local namespace=$1 readers=$2 replica node dns=
    shift 2
    # Readers may move to another replica while the DNS server does.
    for _ in 1 2 3; do
        read -r replica node <<<"$(most_used_replica)"
        [ -n "$node" ] || fail "no replica serves $readers"
        # Without the node form the clients themselves look names up.
        if [ "$namespace" = agents ] || [ "$node" = "$dns" ]; then break; fi
        dns_alone_on "$node"
        dns=$node
    done
    start_writes

    step "power loss of $node, whose replica $replica serves $readers elsewhere"
    "$cluster/node" stop "$node"
    on_exit "[ -f '$state/$node/pid' ] || '$cluster/node' start $node"
    within "$WAIT_SECONDS" "Kubernetes notices it" kubectl wait "node/$node" --for=condition=Ready=Unknown --timeout=1s
    compare_agents --except-node "$node" --min-events 200 --relists 2 "$@" | tee "$work/loss.txt"
    # A reader whose replica is lost is late by more than that in any case.
    if grep -q 'latest by 0\.' "$work/loss.txt"; then
        echo "all readers had left the replica $replica before"
        exit "$CANNOT_RUN"
    fi

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

# most_used_replica: the replica with the most watches, and its node. There are two replicas and more than two
# nodes, so some watches are of other nodes. Connections do not show that: one may stay without watches.
most_used_replica() {
    local replica address node most=0 chosen='' watches
    while read -r replica address node; do
        watches=$(pod_metric "$address" "$node" kubefan_subscribers)
        [ "$watches" -le "$most" ] || most=$watches chosen="$replica $node"
    done < <(kubectl --namespace kubefan get pods --selector "$REPLICAS" \
        --output jsonpath='{range .items[*]}{.metadata.name} {.status.podIP} {.spec.nodeName}{"\n"}{end}')
    printf '%s' "$chosen"
}
