# shellcheck shell=bash
# Runs the commands of pages. Sourced by scenarios after scenario.sh.

# page_block PAGE HEADING [LANGUAGE]: the blocks of code below a heading
page_block() {
    awk -v heading="## $2" -v fence="\`\`\`${3:-sh}" '
        /^## / { is_below = $0 == heading; next }
        /^```/ { is_block = is_below && $0 == fence; next }
        is_block { print }' "$root/docs/$1"
}

# run_page PAGE HEADING [SED…]: runs the commands of a block one after the other, as a reader types them.
# A command that goes on in the background is a port-forward: the next one waits for its port.
run_page() {
    local page=$1 heading=$2 command port
    shift 2
    page_block "$page" "$heading" | sed -e :a -e '/\\$/{N;s/\\\n */ /;ba' -e '}' -e '/^$/d' "$@" >"$work/commands"
    [ -s "$work/commands" ] || fail "$page has no commands below $heading"
    while IFS= read -r command <&3; do
        step "$page: $command"
        case $command in
            *'&')
                port=$(sed -nE 's/.* ([0-9]+)(:[0-9]+)? &$/\1/p' <<<"$command")
                within 10 "port $port is free" is_free "$port"
                typed "exec ${command%&}" >>"$work/forward.log" 2>&1 &
                forwards+=($!)
                within 20 "port $port answers" answers "$port"
                ;;
            *--watch*)
                # It goes on until it is stopped; its first lines show that it works.
                rm -f "$work/watch.log"
                typed "${command/kubectl/exec kubectl}" >"$work/watch.log" 2>&1 &
                forwards+=($!)
                within 20 "the watch has printed pods" grep -q coredns "$work/watch.log" || { cat "$work/watch.log" && return 1; }
                head -2 "$work/watch.log"
                ;;
            *)
                (typed "$command") >"$work/output" 2>&1 || { cat "$work/output" && fail "this command of docs/$page failed: $command"; }
                head -3 "$work/output"
                ;;
        esac
    done 3<"$work/commands"
    stop_forwards
}
# typed COMMAND: replaces a subshell by the command, where the apiserver is. It can write only to what is the
# cluster's: it comes from a page, and runs as root.
typed() {
    # shellcheck disable=SC2016 # variables of that shell
    exec ip netns exec "$netns" bash -c 'mount --bind "$1" "$1" && mount --options remount,bind,ro / && cd "$2" && shift 2 && exec "$@"' \
        typed "$state" "$work" env PATH="$work/bin:$PATH" "${helm_directories[@]}" bash -c "set -euo pipefail; $1"
}
# answers PORT
answers() { inside bash -c "exec 9<>/dev/tcp/127.0.0.1/$1"; }
is_free() { ! answers "$1"; }
# What goes on in the background.
forwards=()
stop_forwards() {
    local pid
    for pid in "${forwards[@]}"; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    forwards=()
}
on_exit stop_forwards
