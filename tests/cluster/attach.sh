# shellcheck shell=bash
# Programs of the cluster that read through kubefan. Sourced by scenarios after scenario.sh.

# attached_kubeconfig SERVER NAME CA TOKEN: leads to kubefan, whose certificate is for NAME
attached_kubeconfig() {
    cat <<YAML
apiVersion: v1
kind: Config
clusters: [{ name: kubefan, cluster: { server: "$1", tls-server-name: "$2", certificate-authority: "$3" } }]
users: [{ name: user, user: { token: "$4" } }]
contexts: [{ name: kubefan, context: { cluster: kubefan, user: user } }]
current-context: kubefan
YAML
}

# is_attached ADDRESS COMMAND… PROGRAM: the program has connections to kubefan, and none to the apiserver. The
# kernel keeps 15 bytes of its name. COMMAND runs `ss` where the program is.
is_attached() {
    local address=$1 program=${*: -1} connections
    connections=$("${@:2:$#-2}" ss --no-header --tcp --numeric --processes state established | grep -F "\"${program:0:15}\"")
    grep -qF " $address " <<<"$connections" && ! grep -qF " $control_plane:6443 " <<<"$connections"
}
