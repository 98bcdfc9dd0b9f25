//! The decoders, and the programs in `tests/decoders` and `tests/clients` that read with them. A
//! decoder whose tools are not installed is left out, by name.

use std::{ffi::OsString, fs, path::Path, process::Command};

use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::{Value, json};

use super::{
    World,
    decoder_reads::{Curl, End, Read, Source},
    rust_decoders::{self, Access},
};
use crate::harness::{process::Process, tools};

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/decoders");
const CLIENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients");
/// Chromium's programs, of which the first that is installed is used. Debian's script for the first
/// starts another process, which would survive it.
const BROWSERS: [&str; 3] = ["/usr/lib/chromium/chromium-headless-shell", "chromium", "google-chrome"];
pub(super) const JSON: &str = "application/json";
pub(super) const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// A decoder, and how to start it.
pub(super) struct Decoder {
    pub(super) name: &'static str,
    program: Program,
    /// The `Accept` header that names its encoding.
    pub(super) accept: &'static str,
    /// Whether its watches are gzip bodies.
    pub(super) is_gzip: bool,
    /// The end of a watch whose connection is cut.
    pub(super) cut: End,
}

#[derive(Clone)]
enum Program {
    /// The words of a command that takes the reads as JSON after them.
    Words(Vec<OsString>),
    /// A browser, which takes the reads in the fragment of its page.
    Browser(&'static str),
    Curl,
    KubeRs,
    Reqwest,
}

/// Builds the programs. An error names a decoder and the tool that it lacks.
pub(super) fn all() -> Vec<Result<Decoder, String>> {
    let go = go();
    let python = python();
    let node = node();
    let java = java();
    let has_curl = tools::installed("curl", &["--version"]).map(|()| Program::Curl);
    let decoders = [
        ("net/http", go.clone()),
        ("client-go", go),
        ("kube-rs", Ok(Program::KubeRs)),
        ("reqwest", Ok(Program::Reqwest)),
        ("requests", python.clone()),
        ("urllib3", python.clone()),
        ("aiohttp", python),
        ("Node fetch", node.clone()),
        ("Node http", node),
        ("OkHttp", java.clone()),
        ("Java client", java),
        ("curl", has_curl),
        ("Chromium", browser()),
    ];
    let decoder = |(name, program): (&'static str, Result<Program, String>)| {
        let program = program.map_err(|missing| format!("the decoder of {name}: {missing}"))?;
        // They take a cut connection for the end of a watch, and open the next.
        let goes_on = matches!(name, "client-go" | "kube-rs");
        Ok(Decoder {
            name,
            program,
            accept: if name == "client-go" { PROTOBUF } else { JSON },
            // It asks for gzip except for watches: those of the apiserver have several members.
            is_gzip: name != "kube-rs",
            cut: if goes_on { End::Clean } else { End::Error },
        })
    };
    decoders.into_iter().map(decoder).collect()
}

fn go() -> Result<Program, String> {
    tools::installed("go", &["version"])?;
    let program = tools::go_program("clients", Path::new(CLIENTS));
    Ok(Program::Words(vec![program.into(), "-decode".into()]))
}

fn python() -> Result<Program, String> {
    tools::installed("python3", &["-c", "import venv, ensurepip"])?;
    let dir = Path::new(DIR);
    let python = tools::python("decoders-python", &dir.join("requirements.txt"));
    Ok(Program::Words(vec![python.into(), dir.join("decode.py").into()]))
}

fn node() -> Result<Program, String> {
    // With fetch.
    tools::installed("node", &["--eval", "fetch"])?;
    Ok(Program::Words(vec!["node".into(), Path::new(DIR).join("decode.mjs").into()]))
}

fn java() -> Result<Program, String> {
    tools::installed("javac", &["--version"])?;
    tools::installed("mvn", &["--version"])?;
    let class_path = tools::java_classes("decoders-java", &Path::new(DIR).join("java"), "Decode.java");
    Ok(Program::Words(vec!["java".into(), "-cp".into(), class_path, "Decode".into()]))
}

fn browser() -> Result<Program, String> {
    let found = BROWSERS.into_iter().find(|browser| tools::installed(browser, &["--version"]).is_ok());
    found.map(Program::Browser).ok_or("no Chromium is installed".to_owned())
}

impl Decoder {
    /// Starts the reads, all at the same time. `dir` is empty.
    pub(super) fn start(&self, world: &World, reads: &[Read], dir: &Path) -> Source {
        let log = dir.join("log");
        let task = json!({
            "ca_file": world.api.ca_pem_path(),
            "token": world.api.admin_token(),
            "reads": reads.iter().map(|read| self.described(read)).collect::<Vec<_>>(),
        });
        match &self.program {
            Program::Words(words) => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]).arg(task.to_string()).env("NODE_EXTRA_CA_CERTS", world.api.ca_pem_path());
                Source::Program(Process::spawn("a decoder", &mut command, &log))
            }
            Program::Browser(browser) => {
                let mut command = Command::new(browser);
                command.args(["--headless", "--no-sandbox", "--enable-logging=stderr", "--remote-debugging-port=0"]);
                // The page is a file, and the CA is not the machine's.
                command.args(["--disable-web-security", "--ignore-certificate-errors"]);
                command.arg("--disable-features=LocalNetworkAccessChecks");
                command.arg(format!("--user-data-dir={}", dir.join("profile").display()));
                let fragment: String = form_urlencoded::byte_serialize(task.to_string().as_bytes()).collect();
                command.arg(format!("file://{DIR}/decode.html#{}", fragment.replace('+', "%20")));
                Source::Program(Process::spawn("Chromium", &mut command, &log))
            }
            Program::Curl => Source::Curl(reads.iter().map(|read| (read.name, curl(world, read, dir))).collect()),
            Program::KubeRs => Source::Tasks(rust_decoders::start(true, &access(world), reads)),
            Program::Reqwest => Source::Tasks(rust_decoders::start(false, &access(world), reads)),
        }
    }

    /// A read, as its program takes it.
    fn described(&self, read: &Read) -> Value {
        let mut described = serde_json::to_value(read).expect("a read is JSON");
        described["decoder"] = self.name.into();
        described["url"] = read.url().into();
        described
    }
}

fn access(world: &World) -> Access {
    let ca_pem = fs::read(world.api.ca_pem_path()).expect("the CA is a file");
    let ca_der = CertificateDer::from_pem_slice(&ca_pem).expect("the CA is PEM").to_vec();
    Access { ca_der, token: world.api.admin_token(), http: world.api.handle().client() }
}

/// The apiserver indents lists for programs that call themselves curl.
fn curl(world: &World, read: &Read, dir: &Path) -> Curl {
    let dir = dir.join(read.name);
    fs::create_dir(&dir).expect("the directory is created");
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--no-buffer", "--compressed", "--user-agent", "agent", "--cacert"]);
    command.arg(world.api.ca_pem_path());
    command.args(["--header", &format!("Authorization: Bearer {}", world.api.admin_token()), &read.url()]);
    Curl::new(Process::spawn_apart("curl", &mut command, &dir), dir, read.is_list)
}
