//! Provides the programs of Kubernetes for the tests: etcd, kube-apiserver, kubectl, helm,
//! kube-state-metrics, Prometheus and an operator, and for some tests kube-apiserver of other
//! releases.
//!
//! The first use builds them from Go modules into `target/test-assets`, in directories named after
//! the build inputs. A file lock makes test processes that start together build only once. A rename
//! at the end of a build prevents the use of an incomplete build.

#![expect(clippy::disallowed_methods, reason = "runs before any test does, outside of every runtime")]

use std::{
    env,
    fs::{self, File, TryLockError},
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

/// Paths of the programs.
#[derive(Clone, Debug)]
pub(crate) struct Assets {
    pub(crate) etcd: PathBuf,
    pub(crate) kube_apiserver: PathBuf,
    pub(crate) kubectl: PathBuf,
}

/// A Go module and the programs that are built from it.
struct Module {
    directory: &'static str,
    /// The start of the name of the directory with its programs.
    name: &'static str,
    /// Directory of its programs in KUBEFAN_TEST_ASSETS. Only those of the empty name must exist.
    given: &'static str,
    /// The module that the version comes from.
    versioned: &'static str,
    /// The builds, one after the other: the name of the only program, or empty if each is named
    /// after its package; and the packages.
    builds: &'static [(&'static str, &'static [&'static str], Stamp)],
    /// Build tags.
    tags: &'static str,
    programs: &'static [&'static str],
}

/// The version information in a program.
#[derive(Clone, Copy)]
enum Stamp {
    None,
    /// Without it, kube-apiserver does not serve the APIs that became stable in recent releases.
    Kubernetes,
    /// Without it, helm takes charts for Kubernetes 1.20 unless it is connected to an apiserver.
    Helm,
}
/// The minor release of Kubernetes that helm then assumes, as its own builds do: that of its
/// libraries, and of the apiserver of the tests.
const HELM_ASSUMES_MINOR: &str = "35";

const CONTROL_PLANE: Module = Module {
    directory: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/apiserver"),
    name: "kubernetes",
    given: "",
    versioned: "k8s.io/kubernetes",
    builds: &[
        ("", &["k8s.io/kubernetes/cmd/kube-apiserver", "k8s.io/kubernetes/cmd/kubectl"], Stamp::Kubernetes),
        ("etcd", &["go.etcd.io/etcd/server/v3"], Stamp::None),
    ],
    tags: "",
    programs: &["etcd", "kube-apiserver", "kubectl"],
};
/// kube-apiserver alone, of another release than that of the tests.
const fn of_release(directory: &'static str, given: &'static str) -> Module {
    Module {
        directory,
        name: "kubernetes",
        given,
        versioned: "k8s.io/kubernetes",
        builds: &[("", &["k8s.io/kubernetes/cmd/kube-apiserver"], Stamp::Kubernetes)],
        tags: "",
        programs: &["kube-apiserver"],
    }
}
const RELEASE_BEFORE: Module = of_release(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/apiserver-before"), "before");
const RELEASE_NEXT: Module = of_release(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/apiserver-next"), "next");
const RELEASE_NEWEST: Module = of_release(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/apiserver-newest"), "newest");
const STATE_METRICS: Module = Module {
    directory: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/state-metrics"),
    name: "kube-state-metrics",
    given: "state-metrics",
    versioned: "k8s.io/kube-state-metrics/v2",
    builds: &[("kube-state-metrics", &["k8s.io/kube-state-metrics/v2"], Stamp::None)],
    tags: "",
    programs: &["kube-state-metrics"],
};
const OPERATOR: Module = Module {
    directory: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/operator"),
    name: "operator",
    given: "operator",
    versioned: "sigs.k8s.io/controller-runtime",
    builds: &[("operator", &["kubefan/tests/operator"], Stamp::None)],
    tags: "",
    programs: &["operator"],
};
const HELM: Module = Module {
    directory: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/helm"),
    name: "helm",
    given: "helm",
    versioned: "helm.sh/helm/v3",
    builds: &[("helm", &["helm.sh/helm/v3/cmd/helm"], Stamp::Helm)],
    tags: "",
    programs: &["helm"],
};
const PROMETHEUS: Module = Module {
    directory: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/prometheus"),
    name: "prometheus",
    given: "prometheus",
    versioned: "github.com/prometheus/prometheus",
    builds: &[(
        "",
        &["github.com/prometheus/prometheus/cmd/prometheus", "github.com/prometheus/prometheus/cmd/promtool"],
        Stamp::None,
    )],
    // The tests only need the service discovery of Kubernetes.
    tags: "remove_all_sd,enable_kubernetes_sd",
    programs: &["prometheus", "promtool"],
};
/// The commit of the release before this source tree, 0.1.0. A clone may lack its tag.
const RELEASE_BEFORE_COMMIT: &str = "b09cc2c78278fe7d8d98662b8791d5a8a6dc3256";
/// Shorter waits print no progress.
const PROGRESS_START: Duration = Duration::from_secs(1);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
const ALTERNATIVES: &str = "Alternatives: KUBEFAN_TEST_ASSETS=DIR uses the etcd, kube-apiserver and kubectl in a directory; \
                            KUBEFAN_SKIP_APISERVER=1 skips the tests that need them (they count as ignored).";

/// Cargo's target directory.
pub(crate) fn target_dir() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("cargo's tmp directory is in its target directory")
}

/// Finds the programs or builds them. Waits for a build in another process. The error names the
/// missing prerequisites.
pub(crate) fn get() -> Result<&'static Assets, String> {
    static ASSETS: OnceLock<Result<Assets, String>> = OnceLock::new();
    let find = || {
        let dir = find_or_build(&CONTROL_PLANE)?;
        let [etcd, kube_apiserver, kubectl] = ["etcd", "kube-apiserver", "kubectl"].map(|name| dir.join(name));
        Ok(Assets { etcd, kube_apiserver, kubectl })
    };
    ASSETS.get_or_init(find).as_ref().map_err(Clone::clone)
}

/// Returns the kube-apiserver of the minor release before the one that the tests run against.
pub(crate) fn kube_apiserver_before() -> PathBuf {
    extra(&RELEASE_BEFORE)
}

/// kube-apiserver of the minor release after it.
pub(crate) fn kube_apiserver_next() -> PathBuf {
    extra(&RELEASE_NEXT)
}

/// kube-apiserver of the newest release that builds.
pub(crate) fn kube_apiserver_newest() -> PathBuf {
    extra(&RELEASE_NEWEST)
}

/// kubefan of the release before, built from its commit, or `before/kubefan` of
/// `KUBEFAN_TEST_ASSETS`.
pub(crate) fn kubefan_before() -> PathBuf {
    let given = env::var_os("KUBEFAN_TEST_ASSETS").map(|dir| Path::new(&dir).join("before/kubefan"));
    if let Some(given) = given.filter(|given| given.is_file()) {
        return given;
    }
    let root = target_dir().join("test-assets");
    let dir = root.join(format!("kubefan-{RELEASE_BEFORE_COMMIT}"));
    let source = dir.join("source");
    let binary = dir.join("target/release/kubefan");
    fs::create_dir_all(&source).expect("the directory is created");
    let _lock = lock(&root.join("lock")).unwrap_or_else(|error| panic!("{error}"));
    if !binary.is_file() {
        let build = format!(
            "git archive {RELEASE_BEFORE_COMMIT} | tar -x -C '{0}' && cargo build --release --locked --bin kubefan \
             --manifest-path '{0}/Cargo.toml' --target-dir '{1}'",
            source.display(),
            dir.join("target").display()
        );
        let status = Command::new("sh").args(["-c", &build]).current_dir(env!("CARGO_MANIFEST_DIR")).status();
        assert!(status.is_ok_and(|status| status.success()), "{RELEASE_BEFORE_COMMIT} cannot be built: {build}");
    }
    binary
}

/// Builds the programs of the tests in `integrations`, or finds them.
pub(crate) fn integrations() -> Result<(), String> {
    for module in [&PROMETHEUS, &STATE_METRICS, &OPERATOR] {
        find_or_build(module)?;
    }
    Ok(())
}

/// The operator in `tests/operator`.
pub(crate) fn operator() -> PathBuf {
    extra(&OPERATOR)
}

/// kube-state-metrics.
pub(crate) fn kube_state_metrics() -> PathBuf {
    extra(&STATE_METRICS)
}

/// helm.
pub(crate) fn helm() -> PathBuf {
    extra(&HELM)
}

/// The directory with Prometheus and promtool.
pub(crate) fn prometheus() -> PathBuf {
    find_or_build(&PROMETHEUS).unwrap_or_else(|error| panic!("{error}"))
}

/// A program that only some tests need.
fn extra(module: &Module) -> PathBuf {
    let dir = find_or_build(module).unwrap_or_else(|error| panic!("{error}"));
    dir.join(module.programs[0])
}

/// The directory with the programs of a module.
fn find_or_build(module: &Module) -> Result<PathBuf, String> {
    let recipe = Recipe::read(module)?;
    if let Some(given) = env::var_os("KUBEFAN_TEST_ASSETS") {
        let dir = Path::new(&given).join(module.given);
        match missing_in(module, &dir) {
            None => return Ok(dir),
            Some(name) if module.given.is_empty() => {
                return Err(format!("KUBEFAN_TEST_ASSETS={} has no {name}", given.display()));
            }
            Some(_) => {}
        }
    }
    let root = target_dir().join("test-assets");
    let dir = root.join(&recipe.name);
    fs::create_dir_all(&root).map_err(|error| format!("cannot create {}: {error}", root.display()))?;
    let _lock = lock(&root.join("lock"))?;
    if missing_in(module, &dir).is_some() {
        recipe.build(&dir)?;
    }
    match missing_in(module, &dir) {
        Some(name) => Err(format!("the build did not create {name} in {}", dir.display())),
        None => Ok(dir),
    }
}

/// The first program of a module that is not in a directory.
fn missing_in(module: &Module, dir: &Path) -> Option<&'static str> {
    module.programs.iter().copied().find(|name| !dir.join(name).is_file())
}

/// The build inputs. The name changes whenever the Go module, its sources or its build tags change.
struct Recipe<'a> {
    module: &'a Module,
    /// The version, such as `1.35.4`.
    version: String,
    name: String,
}

impl Recipe<'_> {
    fn read(module: &Module) -> Result<Recipe<'_>, String> {
        let read = |file: &str| {
            let path = Path::new(module.directory).join(file);
            fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))
        };
        let go_mod = read("go.mod")?;
        let go_sum = read("go.sum")?;
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let required = |words: Vec<String>| {
            let at = words.iter().position(|word| word == module.versioned)?;
            // A comment may name the module too.
            let version = words.get(at + 1)?.strip_prefix('v')?;
            version.starts_with(|first: char| first.is_ascii_digit()).then(|| version.to_owned())
        };
        let version = go_mod.lines().find_map(|line| required(words(line)));
        let version =
            version.ok_or_else(|| format!("{}/go.mod does not require {}", module.directory, module.versioned))?;
        let mut hasher = DefaultHasher::new();
        (&go_mod, &go_sum).hash(&mut hasher);
        if !module.tags.is_empty() {
            module.tags.hash(&mut hasher);
        }
        for source in sources(module.directory)? {
            source.hash(&mut hasher);
        }
        let name = format!("{}-{version}-{:08x}", module.name, hasher.finish() as u32);
        Ok(Recipe { module, version, name })
    }

    /// Builds into a directory beside `dir`, and renames it to `dir` when it is complete.
    fn build(&self, dir: &Path) -> Result<(), String> {
        let partial = dir.with_file_name(format!("{}.partial", self.name));
        let io_error = |error: io::Error| format!("cannot create {}: {error}", dir.display());
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(io_error)?;
        }
        fs::create_dir_all(&partial).map_err(io_error)?;
        for (program, packages, stamp) in self.module.builds {
            let what = format!("{}, up to 6 minutes the first time", packages.join(" and "));
            let output = if program.is_empty() { partial.clone() } else { partial.join(program) };
            go_build(self.module, &what, &partial, &output, &self.ldflags(*stamp), packages)?;
        }
        if dir.exists() {
            fs::remove_dir_all(dir).map_err(io_error)?;
        }
        fs::rename(&partial, dir).map_err(io_error)
    }

    fn ldflags(&self, stamp: Stamp) -> String {
        match stamp {
            Stamp::None => return "-s -w".to_owned(),
            Stamp::Helm => {
                let places = ["chartutil", "lint/rules"].map(|package| {
                    let version = format!("-X helm.sh/helm/v3/pkg/{package}.k8sVersion");
                    format!("{version}Major=1 {version}Minor={HELM_ASSUMES_MINOR}")
                });
                let version = format!("-X helm.sh/helm/v3/internal/version.version=v{}", self.version);
                return format!("-s -w {version} {}", places.join(" "));
            }
            Stamp::Kubernetes => {}
        }
        let mut numbers = self.version.split('.');
        let major = numbers.next().unwrap_or_default();
        let minor = numbers.next().unwrap_or_default();
        let version = "-X k8s.io/component-base/version.git";
        format!(
            "-s -w {version}Version=v{} {version}Major={major} {version}Minor={minor} {version}TreeState=clean",
            self.version
        )
    }
}

/// The texts of the Go files in a directory, by name. Most modules have none, only requirements.
fn sources(directory: &str) -> Result<Vec<String>, String> {
    let failed = |error: io::Error| format!("cannot read the Go files in {directory}: {error}");
    let entries = fs::read_dir(directory).map_err(failed)?;
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "go"));
    files.sort();
    files.iter().map(fs::read_to_string).collect::<Result<_, _>>().map_err(failed)
}

fn go_build(
    module: &Module,
    what: &str,
    log_dir: &Path,
    output: &Path,
    ldflags: &str,
    packages: &[&str],
) -> Result<(), String> {
    let Module { directory, tags, .. } = *module;
    let log = log_dir.join("build.log");
    let log_file = File::create(&log).map_err(|error| format!("cannot create {}: {error}", log.display()))?;
    let mut go = Command::new("go")
        .args(["build", "-trimpath", "-buildvcs=false", "-tags", tags, "-ldflags", ldflags, "-o"])
        .arg(output)
        .args(packages)
        .current_dir(directory)
        .env("CGO_ENABLED", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log_file)
        .spawn()
        .map_err(|error| {
            format!("the tests with a real kube-apiserver need Go 1.26 or later (https://go.dev/dl/), but `go` does not start: {error}. {ALTERNATIVES}")
        })?;
    let mut progress = Progress::new(format!("building {what}"));
    loop {
        match go.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => {
                let log = fs::read_to_string(&log).unwrap_or_default();
                return Err(format!("`go build` in {directory} ended with {status}:\n{log}\n{ALTERNATIVES}"));
            }
            Ok(None) => progress.wait(),
            Err(error) => return Err(format!("cannot wait for `go build`: {error}")),
        }
    }
}

/// Takes the lock shared with other test processes. Dropping the file releases it.
fn lock(path: &Path) -> Result<File, String> {
    let failed = |error: io::Error| format!("cannot lock {}: {error}", path.display());
    let file = File::create(path).map_err(failed)?;
    let mut progress = Progress::new("waiting for another test process to build kube-apiserver".to_owned());
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => progress.wait(),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
    }
}

/// Reports from time to time which step the process waits for.
struct Progress {
    what: String,
    started: Instant,
    report_at: Instant,
}

impl Progress {
    fn new(what: String) -> Progress {
        let started = Instant::now();
        Progress { what, started, report_at: started + PROGRESS_START }
    }

    /// Waits a moment. Writes to stderr directly, which no test runner captures.
    fn wait(&mut self) {
        if Instant::now() >= self.report_at {
            self.report_at = Instant::now() + PROGRESS_INTERVAL;
            let line = format!("kubefan tests: {} … {} s\n", self.what, self.started.elapsed().as_secs());
            let _ = io::stderr().write_all(line.as_bytes());
        }
        thread::sleep(Duration::from_millis(200));
    }
}
