# Functions that the scripts of this directory share: sourced by each, after `set -euo pipefail`.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=$(basename "$0")
tools=${KUBEFAN_RELEASE_TOOLS:-$root/target/release-tools}

# Pinned: another version may give other bytes. The scripts that source this file use them.
# shellcheck disable=SC2034
about_version=0.9.3
# shellcheck disable=SC2034
cyclonedx_version=0.5.9
# The version of .ci/run.
# shellcheck disable=SC2034
deny_version=0.20.2

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

need() { command -v "$1" >/dev/null || fail "$1 is not installed: $2"; }

# The version in Cargo.toml, which all packages share.
version() {
    local found
    found=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml")
    [ -n "$found" ] || fail "Cargo.toml has no version under [workspace.package]"
    printf '%s' "$found"
}

# The address of the repository, in Cargo.toml; empty if none is given there.
repository() { sed -n '/^\[workspace.package\]/,/^\[/s/^repository = "\(.*\)"$/\1/p' "$root/Cargo.toml"; }

# The commit that is released. KUBEFAN_REVISION replaces it where there is no git repository.
revision() { printf '%s' "${KUBEFAN_REVISION:-$(git -C "$root" rev-parse HEAD)}"; }

# Seconds since 1970 that stand in every artefact: those of the commit, unless SOURCE_DATE_EPOCH is set.
epoch() { printf '%s' "${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct)}"; }

# arch_of TARGET: the name that Go, OCI and Kubernetes have for the target's architecture.
arch_of() {
    case $1 in
        x86_64-*) printf amd64 ;;
        aarch64-*) printf arm64 ;;
        *) fail "target $1 is not released: use x86_64-unknown-linux-musl or aarch64-unknown-linux-musl" ;;
    esac
}

# uname_of ARCH: the name that Linux has for it.
uname_of() {
    case $1 in
        amd64) printf x86_64 ;;
        arm64) printf aarch64 ;;
    esac
}

# Waits until no other script installs tools. Until the end of the (sub)shell.
lock_tools() {
    mkdir -p "$tools"
    exec 9>"$tools/lock"
    flock 9
}

# python_tools NAME: installs release/requirements/NAME.txt, whose hashes pip checks, and prints the
# directory of its programs.
python_tools() {
    local venv=$tools/python-$1 requirements=$root/release/requirements/$1.txt
    lock_tools
    if ! cmp -s "$requirements" "$venv/installed.txt"; then
        need python3 "the release needs python3 3.9 or later, with its venv module"
        python3 -m venv --clear "$venv" >&2
        "$venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes \
            -r "$requirements" >&2 || fail "$requirements cannot be installed"
        cp "$requirements" "$venv/installed.txt"
    fi
    printf '%s/bin' "$venv"
}

# crate_tool NAME VERSION [FEATURES]: the path of a crate's program at this version, built if necessary.
crate_tool() {
    local program=$tools/bin/$1 found
    found=$(command -v "$1" || true)
    if [ -n "$found" ] && [ "$("$found" --version 2>/dev/null)" = "$1 $2" ]; then
        printf '%s' "$found"
        return
    fi
    if ! grep -qs "^\"$1 $2 " "$tools/.crates.toml"; then
        need cargo https://rustup.rs
        lock_tools
        cargo install --locked --quiet --root "$tools" "$1" --version "=$2" ${3:+--features "$3"} >&2 ||
            fail "$1 $2 cannot be installed"
    fi
    printf '%s' "$program"
}

# go_tool MODULE PACKAGE: the path of a program of the Go module release/MODULE, built if necessary.
go_tool() {
    local program
    program=$tools/bin/$(basename "$2")
    need go "https://go.dev/dl/ has 1.26 or later"
    lock_tools
    go build -C "$root/release/$1" -trimpath -buildvcs=false -o "$program" "$2" >&2 || fail "$2 cannot be built"
    printf '%s' "$program"
}
