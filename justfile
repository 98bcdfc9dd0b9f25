# Short names for the commands of CONTRIBUTING.md, for `just`. Scripts and CI call those themselves.
# All need Rust, and those that run more than unit tests need Go.

_list:
    @just --list --unsorted

# Unit tests, while you work, or those whose names contain one of these: seconds
unit *names:
    cargo test --lib -- {{ names }}

# The integration tests, or those whose names contain one of these
integration *names:
    cargo test --test integration -- {{ names }}

# Before each commit, 1 minute: format, clippy, unit tests, cycles and comments
quick:
    .ci/run --quick

# Before you push, 4 to 8 minutes: all tests except the slow ones
test:
    cargo test

# The slow integration tests whose names contain one of these
slow +names:
    cargo test --test integration -- --ignored {{ names }}

# Plays a seed of the simulation and prints its story
seed number:
    KUBEFAN_SEED={{ number }} cargo test --test simulation

# Before a pull request: tests, static checks, and the slow checks that the change concerns
ci *options:
    .ci/run {{ options }}

# After a change on the hot path, 2 minutes: instructions (needs valgrind and gungraun-runner), times
bench:
    cargo bench -p kubefan-benches --bench instructions
    cargo bench -p kubefan-benches --bench micro

# The checks of the Go, Python and TypeScript clients (needs Python 3 and Node.js 20), 1 to 2 minutes each
clients:
    clients/go/check
    clients/python/check
    clients/typescript/check

# Renews the overlays and the table of values after a change of the Helm chart
render:
    KUBEFAN_RENDER=1 cargo test --test integration chart::rendered -- --ignored
