# shellcheck shell=bash
# Shared by the scripts of this directory: sourced by each, after `set -euo pipefail`. It has the names
# and addresses of the cluster, and the functions that run commands in it.
# shellcheck disable=SC2034 # the scripts that source this file use its variables

cluster=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$cluster/../.." && pwd)
script=$(basename "$0")
chart=$root/deploy/helm/kubefan

# What is kept between runs is beside that of .ci/run.
cache=${KUBEFAN_CI_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kubefan-ci}/cluster
programs=$cache/programs
images=$cache/images
# What a cluster writes: certificates, logs, etcd's data, the nodes' containers. `up` begins anew.
state=$cache/state
certificates=$state/certificates
# The directories of the machine that nodes have made.
made_directories=$state/made-directories
export KUBECONFIG=$certificates/admin.kubeconfig
# kubectl would write what it discovers to the user's.
export KUBECACHEDIR=$state/kubectl
# Most programs of the nodes are there, and not every user looks there.
PATH=$PATH:/usr/sbin:/sbin

# Addresses in namespaces of the network that have no way out: .1 is the control plane, .1N node N.
node_network=10.99.0
pod_network=10.98
service_network=10.96
control_plane=$node_network.1
netns=kubefan-cluster
nodes_max=4
# The nodes have the images already, so no registry answers to this name.
registry=registry.example

# Scenarios change their directory.
if [ -n "${KUBEFAN_TEST_ASSETS-}" ]; then KUBEFAN_TEST_ASSETS=$(realpath "$KUBEFAN_TEST_ASSETS"); fi

# Exit codes beside 0 and 1.
readonly IN_USE=75 CANNOT_RUN=77 NOT_PREPARED=78

fail() {
    printf '%s: %s\n' "$script" "$*" >&2
    exit 1
}

# usage_if_asked ARGS…: prints the comment at the head of the script, which is its usage text.
usage_if_asked() {
    case ${1-} in
        -h | --help) sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0" && exit ;;
    esac
}

# inside COMMAND…: runs a command in the network of the control plane.
inside() { ip netns exec "$netns" "$@"; }

kubectl() { inside "$(test_asset kubectl)" "$@"; }

# Those of the user are left alone.
helm_directories=(HELM_CACHE_HOME="$state/helm" HELM_CONFIG_HOME="$state/helm" HELM_DATA_HOME="$state/helm")
helm() { inside env "${helm_directories[@]}" "$(test_asset helm)" "$@"; }

# test_asset NAME: the path of a program that the integration tests have built: the newest build.
test_asset() {
    local folder=kubernetes found
    [ "$1" != helm ] || folder=helm
    if [ -n "${KUBEFAN_TEST_ASSETS-}" ]; then
        for found in "$KUBEFAN_TEST_ASSETS/$1" "$KUBEFAN_TEST_ASSETS/$1/$1"; do
            [ ! -f "$found" ] || { printf '%s' "$found" && return; }
        done
    fi
    found=$(find "$(target)/test-assets" -maxdepth 2 -path "*/$folder-*/$1" ! -path '*.partial/*' -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -1)
    [ -n "$found" ] || return 1
    printf '%s' "${found#* }"
}

# Cargo's target directory, as .ci/run chooses it.
target() {
    local shared=$root/target
    [ "${CI-}" != true ] || shared=$(dirname "$cache")/target
    printf '%s' "${CARGO_TARGET_DIR:-$shared}"
}

# The commit that `scenarios/upgrade` begins with: before settings moved from flags to the configuration
# file. Take a later one when its chart can no longer be installed.
earlier_commit=49ec9437

# earlier_binary: kubefan of that commit, or KUBEFAN_TEST_EARLIER_BINARY
earlier_binary() {
    local found=${KUBEFAN_TEST_EARLIER_BINARY:-$programs/kubefan-$earlier_commit}
    [ -x "$found" ] || return 1
    printf '%s' "$found"
}

# kubefan_binary: KUBEFAN_TEST_BINARY, or the newest program that is built.
kubefan_binary() {
    local found=${KUBEFAN_TEST_BINARY-}
    [ -n "$found" ] || found=$(find "$(target)"/{dist,release,debug}/kubefan -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -1 | cut -d ' ' -f 2-)
    [ -x "$found" ] || return 1
    printf '%s' "$found"
}

# chart_version CHART: the version of kubefan that a chart installs.
chart_version() { sed -n 's/^appVersion: "\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$1/Chart.yaml"; }

# node_pid NODE: the process that is pid 1 of a node.
node_pid() { cat "$state/$1/pid" 2>/dev/null; }

# on_node NODE COMMAND…: runs a command on a node.
on_node() {
    local node=$1 pid
    shift
    pid=$(node_pid "$node") || fail "$node is not running"
    nsenter --target "$pid" --mount --pid --net --uts --ipc --cgroup "$@"
}

# within SECONDS WHAT COMMAND…: waits until the command succeeds.
within() {
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt "$end" ] || { printf '%s: not in time: %s\n' "$script" "$what" >&2 && return 1; }
        sleep 0.2
    done
}

# The hierarchies in which a node has a cgroup.
controllers=(cpu cpuacct cpuset memory devices freezer blkio pids systemd)
# own_cgroup CONTROLLER: the cgroup of this process in its hierarchy
own_cgroup() {
    awk -F: -v wanted="$1" '{ sub("^name=", "", $2); n = split($2, names, ","); for (i = 1; i <= n; i++) if (names[i] == wanted) print $3 }' /proc/self/cgroup
}

# check_machine: ends with CANNOT_RUN, and names what is missing.
check_machine() {
    local missing=() packages=() hierarchies=() need
    [ "$(id -u)" = 0 ] || missing+=("root")
    # The commands of a package; CNI's plugins have a directory of their own.
    for need in containerd:containerd ctr:containerd runc:runc iptables:iptables nft:nftables conntrack:conntrack ipset:ipset \
        ethtool:ethtool busybox:busybox-static ip:iproute2 ss:iproute2 nsenter:util-linux setsid:util-linux flock:util-linux openssl:openssl \
        strip:binutils curl:curl cmp:diffutils pgrep:procps; do
        command -v "${need%:*}" >/dev/null || packages+=("${need#*:}")
    done
    [ -x /usr/lib/cni/bridge ] || packages+=(containernetworking-plugins)
    ! ldd "$(command -v busybox)" >/dev/null 2>&1 || packages+=(busybox-static)
    if [ ${#packages[@]} != 0 ]; then
        mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
        missing+=("packages (apt-get install --no-install-recommends ${packages[*]})")
    fi
    # In a unified hierarchy this has never been tried.
    for need in "${controllers[@]}"; do
        if [ -z "$(own_cgroup "$need")" ] || [ ! -w "/sys/fs/cgroup/$need" ]; then hierarchies+=("$need"); fi
    done
    [ ${#hierarchies[@]} = 0 ] || missing+=("cgroup v1 in /sys/fs/cgroup, writable, with the hierarchies ${hierarchies[*]}")
    # Policies are enforced between pods of one node too.
    [ -e /proc/sys/net/bridge/bridge-nf-call-iptables ] || missing+=("the kernel module br_netfilter, loaded")
    unshare --net --mount --pid --uts --ipc --cgroup --fork true 2>/dev/null || missing+=("the right to make namespaces")
    [ ${#missing[@]} = 0 ] && return
    printf '%s: this machine cannot run the cluster, because it lacks:\n' "$script" >&2
    printf '    %s\n' "${missing[@]}" >&2
    exit "$CANNOT_RUN"
}

# sources_of PROGRAM: a hash of the files that it is built from.
sources_of() {
    local module
    case $1 in
        agent | coredns) module=$1 ;;
        kube-router) module=network-policy ;;
        *) module=kubernetes ;;
    esac
    (cd "$cluster/$module" && find . -type f ! -name '*_test.go' -print0 | sort --zero-terminated | xargs --null sha256sum) | sha256sum
}
# is_current PROGRAM: whether it was built from the files that this clone has.
is_current() { sources_of "$1" | cmp --silent - "$programs/$1.sources"; }

# check_prepared: ends with NOT_PREPARED, and names what is missing. The agent changes more often than the
# rest, and takes seconds, so an old one is built anew.
check_prepared() {
    local missing=() name
    for name in kubelet kube-controller-manager kube-proxy kube-scheduler coredns kube-router; do
        [ -x "$programs/$name" ] && is_current "$name" || missing+=("$name")
    done
    for name in pause busybox coredns agent; do
        [ -f "$images/$name.tar" ] || missing+=("the image of $name")
    done
    for name in etcd kube-apiserver kubectl helm; do
        test_asset "$name" >/dev/null || missing+=("$name")
    done
    if [ ${#missing[@]} = 0 ]; then
        is_current agent || timeout 300 "$cluster/prepare" --agent || missing+=(agent)
    fi
    [ ${#missing[@]} = 0 ] && return
    printf '%s: tests/cluster/prepare has not built: %s\n' "$script" "$(printf '%s, ' "${missing[@]}" | sed 's/, $//')" >&2
    exit "$NOT_PREPARED"
}

# lock_machine: takes the lock of this machine's cluster, as file 9, or ends with IN_USE. Its addresses and
# namespaces are the machine's, so there is one for all clones and users. `run` holds it for what it
# calls. Programs that stay must not hold it.
lock_machine() {
    [ -z "${KUBEFAN_CLUSTER_IS_LOCKED-}" ] || return 0
    exec 9>/run/kubefan-cluster.lock
    flock --nonblock 9 || in_use "another run starts, uses or ends the cluster of this machine"
    export KUBEFAN_CLUSTER_IS_LOCKED=1
}
in_use() {
    printf '%s: %s\n' "$script" "$*" >&2
    exit "$IN_USE"
}
# refuse_second_cluster: ends with IN_USE if someone has started one.
refuse_second_cluster() { ! compgen -G "/run/netns/$netns*" >/dev/null || in_use "a cluster is up: tests/cluster/down ends it"; }

# make_image NAME:TAG OPTIONS FILE…: writes an image of one layer to standard output, in the format of
# `docker save`, which `ctr images import` reads.
#
#   OPTIONS    JSON of the image's configuration, such as {"Entrypoint":["/kubefan"]}
#   FILE       PATH=SOURCE is a file of the image, PATH->TARGET a symbolic link
make_image() (
    reference=$1 options=$2
    shift 2
    work=$(mktemp -d)
    trap 'rm -r "$work"' EXIT
    mkdir -p "$work/files/tmp" "$work/image"
    chmod 1777 "$work/files/tmp"
    for file in "$@"; do
        case $file in
            *'->'*) mkdir -p "$work/files/$(dirname "${file%->*}")" && ln -s "${file#*->}" "$work/files/${file%->*}" ;;
            *) install -D "${file#*=}" "$work/files/${file%%=*}" ;;
        esac
    done
    tar --create --file "$work/image/layer.tar" --directory "$work/files" --owner 0 --group 0 .
    layer=$(sha256sum "$work/image/layer.tar" | cut -d ' ' -f 1)
    case $(uname -m) in
        x86_64) arch=amd64 ;;
        aarch64) arch=arm64 ;;
        *) fail "no images are made for $(uname -m)" ;;
    esac
    printf '{"architecture":"%s","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' "$arch" "$options" "$layer" >"$work/image/config.json"
    printf '[{"Config":"config.json","RepoTags":["%s/%s"],"Layers":["layer.tar"]}]' "$registry" "$reference" >"$work/image/manifest.json"
    tar --create --directory "$work/image" manifest.json config.json layer.tar
)

# make_kubefan_image TAG BINARY: writes the image of a kubefan that is built already. A binary that is
# not static gets the libraries of this machine beside it.
make_kubefan_image() (
    tag=$1 binary=$2 libraries=()
    work=$(mktemp -d)
    trap 'rm -r "$work"' EXIT
    strip --strip-debug -o "$work/kubefan" "$binary"
    while read -r library; do
        libraries+=("${library#/}=$library")
    done < <(ldd "$binary" 2>/dev/null | grep -o '/[^ ]*' || true)
    make_image "kubefan:$tag" '{"User":"65532:65532","Entrypoint":["/kubefan"],"Cmd":["serve"]}' "kubefan=$work/kubefan" "${libraries[@]}"
)

# import_image NODE FILE: gives an image to a node.
import_image() { on_node "$1" ctr --namespace k8s.io images import "$2" >/dev/null; }

# remove_scenario: deletes what a scenario has made, without waiting for pods to end.
remove_scenario() {
    local namespaces=(kubefan agents shop node-agent)
    helm uninstall kubefan --namespace kubefan --ignore-not-found --wait=false >/dev/null
    for namespace in "${namespaces[@]}"; do
        kubectl --namespace "$namespace" delete pods --all --force --grace-period 0 >/dev/null 2>&1 || true
    done
    kubectl delete namespaces --ignore-not-found --timeout 60s "${namespaces[@]}" >/dev/null
    kubectl delete clusterroles,clusterrolebindings --ignore-not-found agents pods-reader kubefan-sidecar kubefan-sidecar-compared shop-admin >/dev/null 2>&1 || true
}

# nodes: the names of the nodes that run.
nodes() {
    local folder
    for folder in "$state"/n[1-9]; do
        [ ! -f "$folder/pid" ] || basename "$folder"
    done
}
