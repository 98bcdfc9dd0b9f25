//! The scripts that make the image and the archives, on small static programs instead of kubefan,
//! whose build takes minutes: the content of the image and its metadata, equal bytes from equal
//! inputs, the refusals, and the paths where cargo binstall and krew look for the archives.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};

use crate::harness::{kubefan, tests};

tests! {
    python slow_release: the_image_says_how_it_runs_and_holds_nothing_else, equal_inputs_give_an_equal_digest,
        a_binary_that_needs_libraries_is_refused, archives_are_where_cargo_binstall_and_krew_look;
}

/// Answers as kubefan does, as far as release/check-image asks.
const STAND_IN: &str = r#"
package main

import (
	"bufio"
	"net"
	"os"
)

func main() {
	if os.Args[1] == "version" {
		os.Stdout.WriteString("kubefan VERSION (linux/x86_64)\n")
		return
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	os.Stderr.WriteString("kubefan: serving admin on " + listener.Addr().String() + "\n")
	for {
		connection, err := listener.Accept()
		if err != nil {
			return
		}
		// All of the request: closing with bytes unread would reset the connection.
		for lines := bufio.NewScanner(connection); lines.Scan() && lines.Text() != ""; {
		}
		connection.Write([]byte("HTTP/1.1 200 OK\r\n\r\nok"))
		connection.Close()
	}
}
"#;

/// Inputs of release/image in a directory of their own, and its output.
struct Images {
    dir: tempfile::TempDir,
}

impl Images {
    /// Builds the static programs.
    fn new() -> Images {
        let images = Images { dir: tempfile::tempdir().unwrap() };
        images.build("amd64", &STAND_IN.replace("VERSION", env!("CARGO_PKG_VERSION")));
        images.build("arm64", "package main\n\nfunc main() {}\n");
        fs::write(images.path("licenses"), "licences\n").unwrap();
        images
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn build(&self, arch: &str, source: &str) {
        let file = self.path(&format!("{arch}.go"));
        fs::write(&file, source).unwrap();
        let mut go = Command::new("go");
        go.args(["build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o"]).arg(self.path(arch)).arg(file);
        succeeds(&go.envs([("CGO_ENABLED", "0"), ("GOOS", "linux"), ("GOARCH", arch)]).output().unwrap());
    }

    /// Runs release/image. The time and the commit are given, so no git repository is needed.
    fn image(&self, output: &str, binaries: &[(&str, &Path)]) -> Output {
        let mut command = script("image");
        for (arch, binary) in binaries {
            command.arg("--binary").arg(format!("{arch}={}", binary.display()));
        }
        command.arg("--output").arg(self.path(output)).env("KUBEFAN_LICENSES", self.path("licenses"));
        command.output().unwrap()
    }

    /// The image of both platforms, and its digest.
    fn both(&self, output: &str) -> String {
        let amd64 = self.path("amd64");
        let arm64 = self.path("arm64");
        succeeds(&self.image(output, &[("amd64", &amd64), ("arm64", &arm64)])).trim().to_owned()
    }

    /// A JSON document of a layout by its digest.
    fn blob(&self, output: &str, digest: &Value) -> Value {
        let name = digest.as_str().unwrap().replace(':', "/");
        serde_json::from_slice(&fs::read(self.path(output).join("blobs").join(name)).unwrap()).unwrap()
    }
}

fn script(name: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("release").join(name));
    command.envs([
        ("SOURCE_DATE_EPOCH", "1700000000"),
        ("KUBEFAN_REVISION", "0123456789abcdef0123456789abcdef01234567"),
        ("KUBEFAN_SOURCE", "https://example.com/kubefan"),
    ]);
    command
}

/// Returns the output of a command. Panics with its errors if it fails.
fn succeeds(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// The errors of a command that must fail.
fn fails(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

async fn the_image_says_how_it_runs_and_holds_nothing_else() {
    let images = Images::new();
    let digest = images.both("image");
    let index = images.blob("image", &json!(digest));
    let platforms = index["manifests"].as_array().unwrap().iter().map(|manifest| &manifest["platform"]);
    let wanted = [
        json!({ "architecture": "amd64", "os": "linux" }),
        json!({ "architecture": "arm64", "os": "linux", "variant": "v8" }),
    ];
    assert_eq!(platforms.collect::<Vec<_>>(), wanted.iter().collect::<Vec<_>>());
    for manifest in index["manifests"].as_array().unwrap() {
        let manifest = images.blob("image", &manifest["digest"]);
        let config = images.blob("image", &manifest["config"]["digest"]);
        assert_eq!(config["created"], "2023-11-14T22:13:20Z");
        let config = &config["config"];
        assert_eq!(config["User"], "65532:65532");
        assert_eq!((&config["Entrypoint"], &config["Cmd"]), (&json!(["/kubefan"]), &json!(["serve"])));
        let labels = &config["Labels"];
        assert_eq!(labels["org.opencontainers.image.version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(labels["org.opencontainers.image.revision"], "0123456789abcdef0123456789abcdef01234567");
        assert_eq!(labels["org.opencontainers.image.source"], "https://example.com/kubefan");
    }
    // Its files, its size, its digests; as root it also runs the program for this machine.
    let checked = succeeds(&script("check-image").arg(images.path("image")).output().unwrap());
    assert!(checked.contains("linux/amd64: sha256:") && checked.contains("linux/arm64: sha256:"), "{checked}");
    let blobs = images.path("image").join("blobs/sha256");
    let largest = fs::read_dir(&blobs).unwrap().map(|entry| entry.unwrap().path());
    let largest = largest.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    fs::write(&largest, "other bytes").unwrap();
    let found = fails(&script("check-image").arg(images.path("image")).output().unwrap());
    assert!(found.contains("has another digest"), "{found}");
}

async fn equal_inputs_give_an_equal_digest() {
    let one = Images::new();
    let other = Images::new();
    assert_eq!(one.both("image"), other.both("another"));
    fs::write(other.path("licenses"), "other licences\n").unwrap();
    assert_ne!(one.both("again"), other.both("changed"));
}

async fn a_binary_that_needs_libraries_is_refused() {
    let images = Images::new();
    // cargo built it for this host, whose C library is a shared one.
    let dynamic = PathBuf::from(kubefan::binary());
    let refusal = fails(&images.image("image", &[("amd64", &dynamic)]));
    assert!(refusal.contains("is not static: it needs a dynamic linker"), "{refusal}");
    let refusal = fails(&images.image("image", &[("arm64", &images.path("amd64"))]));
    assert!(refusal.contains("is built for EM_X86_64"), "{refusal}");
    assert!(!images.path("image").exists());
}

/// The targets of a release, with the names that Go has for their architectures.
const TARGETS: [(&str, &str); 2] = [("x86_64-unknown-linux-musl", "amd64"), ("aarch64-unknown-linux-musl", "arm64")];

/// Packs both programs into `output`, and returns the paths of the archives.
fn archives(images: &Images, output: &str) -> Vec<PathBuf> {
    let archive = |(target, arch): (&str, &str)| {
        let mut command = script("archive");
        command.args(["--target", target, "--binary"]).arg(images.path(arch));
        command.arg("--licenses").arg(images.path("licenses")).arg(images.path(output));
        succeeds(&command.output().unwrap()).trim().into()
    };
    TARGETS.map(archive).into()
}

/// A setting of `[package.metadata.binstall]`, with its variables replaced.
fn binstall(setting: &str, target: &str) -> String {
    let manifest = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap();
    let value = manifest.lines().find_map(|line| line.strip_prefix(setting)?.strip_prefix(" = ")).unwrap();
    let variables = [("name", "kubefan"), ("bin", "kubefan"), ("version", env!("CARGO_PKG_VERSION"))];
    let further = [("target", target), ("binary-ext", ""), ("repo", "https://example.com/kubefan")];
    let replaced = |text: String, (name, value): (&str, &str)| text.replace(&format!("{{ {name} }}"), value);
    variables.into_iter().chain(further).fold(value.trim_matches('"').to_owned(), replaced)
}

async fn archives_are_where_cargo_binstall_and_krew_look() {
    let images = Images::new();
    let made = archives(&images, "archives");
    let again = archives(&images, "again");
    for ((target, _), (path, other)) in TARGETS.iter().zip(made.iter().zip(&again)) {
        assert_eq!(fs::read(path).unwrap(), fs::read(other).unwrap(), "{target}");
        let url = binstall("pkg-url", target);
        assert_eq!(url.rsplit('/').next(), path.file_name().unwrap().to_str(), "{target}");
        let listed = succeeds(&Command::new("tar").arg("-tzf").arg(path).output().unwrap());
        assert!(listed.lines().any(|line| line == binstall("bin-dir", target)), "{target}: {listed}");
    }
    let manifest = succeeds(&script("krew-manifest").arg(images.path("archives")).output().unwrap());
    assert!(!["SOURCE", "VERSION", "SHA256_"].iter().any(|left| manifest.contains(left)), "{manifest}");
    let manifest: Value = serde_saphyr::from_str(&manifest).unwrap();
    assert_eq!(manifest["spec"]["version"], format!("v{}", env!("CARGO_PKG_VERSION")));
    let platforms = manifest["spec"]["platforms"].as_array().unwrap();
    assert_eq!(platforms.len(), TARGETS.len());
    for ((platform, path), (target, arch)) in platforms.iter().zip(&made).zip(TARGETS) {
        assert_eq!(platform["selector"]["matchLabels"]["arch"], arch);
        assert_eq!(platform["uri"], binstall("pkg-url", target));
        let sum = succeeds(&Command::new("sha256sum").arg(path).output().unwrap());
        assert_eq!(platform["sha256"], sum.split(' ').next().unwrap());
    }
}
