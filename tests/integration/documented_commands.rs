//! Every command in the shell blocks of README.md, CONTRIBUTING.md, docs/ and the READMEs of the
//! clients is checked, or named here with the reason why not. Those of kubefan run as printed where
//! a simulated apiserver is enough; the others are parsed, so that no page shows a flag that does
//! not exist.

use std::{collections::BTreeSet, path::Path};

use crate::{
    documented_configuration::{Block, blocks, blocks_of},
    harness::{kubefan::run_with, simulated::Simulated, tests},
};

tests! {
    local slow_release: every_documented_command_of_kubefan_is_understood,
        every_other_documented_command_has_its_reason,
        every_documented_test_and_file_exists;
}

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The commands of kubefan that run as printed.
const RUN: [&str; 6] = ["get", "watch", "subscribers", "top", "verify", "estimate"];

/// Commands of other programs, by how they begin, and where they are tried.
const OTHERS: [(&str, &str); 46] = [
    ("cargo ", "builds, tests and benchmarks: their filters are checked here, and .ci/run runs them or their like"),
    ("simulation=$(tests/simulation/planted/build)", ".ci/run builds it"),
    ("$simulation", ".ci/run starts it"),
    ("KUBEFAN_PLANTED_BUG=", ".ci/run plants each bug, and none"),
    ("target/dist/deps/informers-HASH", "the benchmark of informers, with the hash of its build"),
    ("go build -C tests/clients", "the tests of informers build it"),
    ("cd examples/go && go run .", "examples.rs runs it"),
    ("cd examples/python", "examples.rs runs what follows it"),
    ("python ", "examples.rs runs it"),
    ("pip install ./clients/python", "clients/python/tests/integration/test_pages.py installs it"),
    ("KUBEFAN=/path/to/kubefan KUBEFAN_TEST_ASSETS=", "clients/go/check runs it at a smaller size"),
    ("go mod ", "clients/go/integration/pages_test.go runs it"),
    ("go run .", "clients/go/integration/pages_test.go builds it"),
    ("(cd /path/to/kubefan/clients/typescript && npm ci && npm pack)", "clients/typescript/check packs it"),
    ("npm install /path/to/kubefan/clients/typescript/", "clients/typescript/check installs it into an empty project"),
    ("node pods.mjs", "clients/typescript/tests/integration/pages.test.ts runs it"),
    ("curl -s 127.0.0.1:7444/metrics", "metrics.rs reads the port"),
    ("curl -s '127.0.0.1:7444/readyz?verbose'", "serve.rs reads the port"),
    ("curl -s --cacert ca.crt --connect-to", "authorization/admin.rs reads the port over TLS, with tokens"),
    ("kubectl --server http://127.0.0.1:7443 get pods", "clients/kubectl.rs runs kubectl through kubefan"),
    ("kubectl --server https://127.0.0.1:7443 --tls-server-name", "clients/kubectl.rs, with TLS and a token"),
    ("KUBECONFIG=", "clients/kubectl.rs, with the file of kubefan kubeconfig"),
    ("kubectl create token", "kubectl's own; credentials.rs uses such tokens"),
    ("kubectl auth can-i", "kubectl's own"),
    ("kubectl create namespace", "kubectl's own"),
    ("kubectl label namespace", "deploy.rs applies the label's policy"),
    (
        "kubectl apply -f ",
        "chart.rs applies what `helm template` prints; the roles beside their commands are kubectl's own",
    ),
    ("kubectl apply -k deploy/overlays/", "deploy.rs applies the overlays to a real apiserver"),
    ("kubectl -n kubefan rollout status", "needs a cluster that runs pods"),
    ("kubectl -n kubefan get configmap kubefan-ca", "needs a cluster that runs pods"),
    ("kubectl -n kubefan port-forward", "needs a cluster that runs pods"),
    ("kubectl -n node-agent ", "needs a cluster that runs pods; deploy.rs applies the overlay"),
    (
        "kubectl -n kubefan exec",
        "needs a cluster that runs pods; check.rs runs the check, with ports that are in use too",
    ),
    ("kubectl -n kubefan patch secret", "managed_tls.rs deletes keys of the Secret"),
    ("kubectl logs", "needs a cluster that runs pods"),
    ("helm ", "chart.rs renders the chart with helm and applies it; an install needs a cluster that runs pods"),
    ("docker buildx build", "needs a container engine and a registry"),
    ("openssl req", "openssl's own; client_certificates.rs makes certificates of the same form"),
    ("kubectl create clusterrolebinding", "kubectl's own"),
    ("kubectl -n kubefan create ", "kubectl's own"),
    ("export ", "the shell's own"),
    ("umask ", "the shell's own"),
    ("ulimit ", "the shell's own"),
    ("ln -s ", "the shell's own"),
    ("release/", "the release workflow; release/image and check-image need root and a built binary"),
    ("sudo release/", "the same"),
];

/// Commands about a published release, which needs a registry and its own signatures.
const OF_A_RELEASE: [&str; 4] = ["sha256sum ", "cosign ", "gh attestation ", "crane "];

/// A command of a document, without its comment, and where it is.
#[derive(Debug, Clone)]
struct Documented {
    place: String,
    text: String,
}

/// The lines of `sh` blocks, and those after a prompt in `console` blocks.
fn documented() -> Vec<Documented> {
    // Decisions show commands of their time.
    let is_current = |block: &Block| !block.page.starts_with("docs/decisions/");
    let all = blocks().into_iter().filter(is_current).chain(blocks_of("CONTRIBUTING.md"));
    let with_commands = all.filter(|block| block.language == "sh" || block.language == "console");
    with_commands.flat_map(|block| commands(&block)).collect()
}

fn commands(block: &Block) -> Vec<Documented> {
    let mut found = Vec::new();
    let mut command = String::new();
    for line in block.text.lines() {
        let is_continued = !command.is_empty();
        let part = if block.language == "sh" || is_continued { Some(line) } else { line.strip_prefix("$ ") };
        command += part.unwrap_or_default();
        if let Some(begun) = command.strip_suffix('\\') {
            command = format!("{} ", begun.trim_end());
            continue;
        }
        let text = command.split(" # ").next().unwrap_or("").trim().to_owned();
        command.clear();
        if !text.is_empty() && !text.starts_with('#') {
            found.push(Documented { place: block.place.clone(), text });
        }
    }
    found
}

/// The words of a simple command, as a shell makes them.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = None::<String>;
    let mut quote = None;
    for c in text.chars() {
        match (quote, c) {
            (None, '\'' | '"') => {
                quote = Some(c);
                word = Some(word.unwrap_or_default());
            }
            (Some(open), c) if open == c => quote = None,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The arguments of the part of a pipe that is a kubefan, if there is one.
fn arguments_of_kubefan(text: &str) -> Option<Vec<String>> {
    text.split('|').find_map(|part| {
        let words = words(part.split(" > ").next().unwrap_or(part));
        let (program, arguments) = words.split_first()?;
        let is_kubefan =
            ["kubefan", "target/debug/kubefan", "target/release/kubefan", "target/dist/kubefan"].contains(&&**program);
        is_kubefan.then(|| arguments.to_vec())
    })
}

async fn every_documented_command_of_kubefan_is_understood() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods,nodes"]).await;
    let mut ran = BTreeSet::new();
    for Documented { place, text } in documented() {
        let Some(arguments) = arguments_of_kubefan(&text) else { continue };
        let mut arguments: Vec<&str> = arguments.iter().map(|word| if word == "PID" { "1" } else { &**word }).collect();
        let command = arguments[0];
        // Flags that name other servers and clusters than those of this test.
        let elsewhere = ["--server", "--admin", "--tls-server-name", "--kubeconfig", "--context", "--for"];
        let is_run = RUN.contains(&command) && !arguments.iter().any(|word| elsewhere.contains(word));
        match command {
            "watch" if is_run => arguments.push("--timeout=1s"),
            _ if is_run => {}
            // The parser reads the others, and then shows the help instead.
            _ => arguments.push("--help"),
        }
        // As a user whose kubeconfig leads to the simulated apiserver, and whose kubefan is at the
        // default addresses.
        let done = run_with(&arguments, |command| {
            command.env("KUBECONFIG", simulated.kubeconfig()).current_dir(simulated.dir.path());
            command.env("KUBEFAN_SERVER", kubefan.grpc_addr.to_string());
            command.env("KUBEFAN_ADMIN", kubefan.admin_addr.to_string());
        })
        .await;
        assert_eq!(done.code, Some(0), "{place}: {text}: {done:?}");
        if is_run {
            ran.insert(command.to_owned());
        }
    }
    assert_eq!(ran, RUN.map(str::to_owned).into(), "these run as printed");
}

async fn every_other_documented_command_has_its_reason() {
    let commands = documented();
    let others = commands.iter().filter(|one| arguments_of_kubefan(&one.text).is_none());
    let begins: Vec<_> = OTHERS.iter().map(|(begin, _)| *begin).chain(OF_A_RELEASE).collect();
    let mut used = BTreeSet::new();
    for Documented { place, text } in others {
        // Settings before a command of cargo.
        let command = text.split_once(" cargo ").filter(|(before, _)| before.starts_with("KUBEFAN_"));
        let command = command.map_or(text.clone(), |(_, after)| format!("cargo {after}"));
        let found = begins.iter().find(|begin| command.starts_with(**begin));
        used.insert(*found.unwrap_or_else(|| panic!("{place}: nothing tries {text:?}; try it, and say where")));
    }
    let stale: Vec<_> = begins.iter().filter(|begin| !used.contains(**begin)).collect();
    assert!(stale.is_empty(), "no document has {stale:?} any more");
}

/// A filter that selects nothing would pass, and show nothing.
async fn every_documented_test_and_file_exists() {
    let listed = std::process::Command::new(std::env::current_exe().unwrap()).arg("--list").output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    for Documented { place, text } in documented() {
        let words = words(&text);
        let tested = words.iter().position(|word| word == "integration").and_then(|at| words.get(at + 1));
        if let Some(filter) = tested.filter(|filter| !filter.starts_with('-') && *filter != "NAME") {
            assert!(listed.contains(&**filter), "{place}: no test has {filter:?} in its name");
        }
        for word in &words {
            let is_file = ["deploy/", "release/", "examples/", "tests/"].iter().any(|start| word.starts_with(start));
            assert!(!is_file || Path::new(ROOT).join(word).exists(), "{place}: there is no {word}");
        }
    }
}
