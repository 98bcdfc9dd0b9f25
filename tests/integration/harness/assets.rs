//! Provides etcd, kube-apiserver and kubectl for the tests. The first use builds them from the Go
//! module `tests/apiserver` into `target/test-assets`, in a directory named after the build inputs.
//! A file lock makes test processes that start together build only once. A rename at the end of the
//! build prevents the use of an incomplete build.

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

const PROGRAMS: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];
const MODULE_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/apiserver");
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
    ASSETS.get_or_init(find_or_build).as_ref().map_err(Clone::clone)
}

fn find_or_build() -> Result<Assets, String> {
    if let Some(dir) = env::var_os("KUBEFAN_TEST_ASSETS") {
        return in_dir(Path::new(&dir)).map_err(|name| format!("KUBEFAN_TEST_ASSETS={} has no {name}", dir.display()));
    }
    let recipe = Recipe::read()?;
    let root = target_dir().join("test-assets");
    let dir = root.join(&recipe.name);
    fs::create_dir_all(&root).map_err(|error| format!("cannot create {}: {error}", root.display()))?;
    let _lock = lock(&root.join("lock"))?;
    in_dir(&dir).or_else(|_| {
        recipe.build(&dir)?;
        in_dir(&dir).map_err(|name| format!("the build did not create {name} in {}", dir.display()))
    })
}

/// The programs in a directory, or the name of the first missing one.
fn in_dir(dir: &Path) -> Result<Assets, &'static str> {
    match PROGRAMS.into_iter().find(|name| !dir.join(name).is_file()) {
        Some(missing) => Err(missing),
        None => Ok(Assets {
            etcd: dir.join("etcd"),
            kube_apiserver: dir.join("kube-apiserver"),
            kubectl: dir.join("kubectl"),
        }),
    }
}

/// The build inputs. The name changes whenever the Go module changes.
struct Recipe {
    /// Such as `1.35.4`.
    kubernetes: String,
    name: String,
}

impl Recipe {
    fn read() -> Result<Recipe, String> {
        let read = |file: &str| {
            let path = Path::new(MODULE_DIR).join(file);
            fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))
        };
        let (go_mod, go_sum) = (read("go.mod")?, read("go.sum")?);
        let version = |module: &str| {
            let mut words = go_mod.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            words
                .find_map(|words| (words.first() == Some(&module)).then(|| words[1].trim_start_matches('v').to_owned()))
                .ok_or_else(|| format!("{MODULE_DIR}/go.mod does not require {module}"))
        };
        let (kubernetes, etcd) = (version("k8s.io/kubernetes")?, version("go.etcd.io/etcd/server/v3")?);
        let mut hasher = DefaultHasher::new();
        (&go_mod, &go_sum).hash(&mut hasher);
        let name = format!("kubernetes-{kubernetes}-etcd-{etcd}-{:08x}", hasher.finish() as u32);
        Ok(Recipe { kubernetes, name })
    }

    /// Builds into a directory beside `dir`, and renames it to `dir` when it is complete.
    fn build(&self, dir: &Path) -> Result<(), String> {
        let partial = dir.with_file_name(format!("{}.partial", self.name));
        let io_error = |error: io::Error| format!("cannot create {}: {error}", dir.display());
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(io_error)?;
        }
        fs::create_dir_all(&partial).map_err(io_error)?;

        // Without version information, kube-apiserver does not serve the APIs that became stable in
        // recent releases.
        let mut numbers = self.kubernetes.split('.');
        let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
        let version = "-X k8s.io/component-base/version.git";
        let ldflags = format!(
            "-s -w {version}Version=v{} {version}Major={major} {version}Minor={minor} {version}TreeState=clean",
            self.kubernetes
        );
        let packages = ["k8s.io/kubernetes/cmd/kube-apiserver", "k8s.io/kubernetes/cmd/kubectl"];
        let what = format!("kube-apiserver v{} from its Go module, about 6 minutes the first time", self.kubernetes);
        go_build(&what, &partial, &partial, &ldflags, &packages)?;
        let what = "etcd from its Go module, seconds to a minute";
        go_build(what, &partial, &partial.join("etcd"), "-s -w", &["go.etcd.io/etcd/server/v3"])?;

        if dir.exists() {
            fs::remove_dir_all(dir).map_err(io_error)?;
        }
        fs::rename(&partial, dir).map_err(io_error)
    }
}

fn go_build(what: &str, log_dir: &Path, output: &Path, ldflags: &str, packages: &[&str]) -> Result<(), String> {
    let log = log_dir.join("build.log");
    let log_file = File::create(&log).map_err(|error| format!("cannot create {}: {error}", log.display()))?;
    let mut go = Command::new("go")
        .args(["build", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, "-o"])
        .arg(output)
        .args(packages)
        .current_dir(MODULE_DIR)
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
                return Err(format!("`go build` in {MODULE_DIR} ended with {status}:\n{log}\n{ALTERNATIVES}"));
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

/// Reports from time to time what the process waits for.
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
