//! Runs async tests as `cargo test` runs ordinary tests: in parallel, filtered by name, each in its
//! own runtime.
//!
//! A test is an `async fn()` that panics when its promise is broken. It is registered in one place,
//! the `tests!` list of its file, under the words of [`Kind`] that say what it needs. A test that
//! is in no list is dead code, which the lints deny.
//!
//! ```ignore
//! tests! {
//!     apiserver: a_pod_is_served, a_relist_leaves_a_gap;      // needs the real kube-apiserver
//!     local: a_bad_flag_is_named;                             // needs nothing
//!     paused: a_429_is_waited_out;                            // in this process, on a paused clock
//!     apiserver slow_faults: a_restart_loses_nothing;         // in .ci/run if a change concerns it
//!     local slow_release alone: a_snapshot_is_shared;         // needs the CPUs for itself
//! }
//! ```
//!
//! `cargo test` reports the slow ones as ignored; `--ignored` or `--include-ignored` runs them, as
//! with any other test program, and so does `KUBEFAN_TEST_SCALE=full`. Several filters select the
//! tests whose names contain one of them, or with `--exact` equal one.
//! Tests wait most of the time, for a process, a watch or a deadline, so [`AT_ONCE_PER_CPU`] of
//! them run on each CPU. Those that need the CPUs for themselves run last, one at a time.
//!
//! With `KUBEFAN_SKIP_APISERVER=1`, tests that need the real apiserver count as ignored; they never
//! disappear silently. A test that hangs fails under its own name after [`TEST_SECONDS_MAX`], so
//! that one hang cannot hide the results of the other tests.

use std::{
    env,
    future::Future,
    io::Write,
    num::NonZero,
    pin::Pin,
    process::ExitCode,
    sync::{Condvar, Mutex},
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Completion, Failed, Trial};

pub(crate) mod apiserver;
pub(crate) mod assets;
pub(crate) mod audit;
pub(crate) mod authorizer;
pub(crate) mod churn;
pub(crate) mod cpu_cgroup;
pub(crate) mod helm;
pub(crate) mod https;
pub(crate) mod kills;
pub(crate) mod kubefan;
pub(crate) mod link;
pub(crate) mod load;
pub(crate) mod memory_cgroup;
pub(crate) mod network;
pub(crate) mod objects;
pub(crate) mod pki;
pub(crate) mod process;
pub(crate) mod prometheus;
pub(crate) mod rbac;
pub(crate) mod record;
pub(crate) mod rest;
pub(crate) mod resuming;
pub(crate) mod rig;
pub(crate) mod secrets;
pub(crate) mod servers;
pub(crate) mod settings;
pub(crate) mod simulated;
pub(crate) mod tools;
pub(crate) mod wait;
pub(crate) mod writes;

/// Time limit of a test. Building the real apiserver before the first test does not count.
const TEST_SECONDS_MAX: u64 = 600;

/// Time limit of a test on a paused clock, where waiting takes no real time.
const PAUSED_SECONDS_MAX: u64 = 24 * 3600;

/// Time limit of a test at full scale, with the builds of its programs.
const FULL_SCALE_SECONDS_MAX: u64 = 2_400;

/// Tests that run at the same time, per CPU. `--test-threads` overrides it.
const AT_ONCE_PER_CPU: usize = 6;

/// The slowest tests that a run names at its end.
const SLOWEST_NAMED: usize = 10;

/// Whether the large form of a test is asked for: `KUBEFAN_TEST_SCALE=full`.
pub(crate) fn is_full_scale() -> bool {
    env::var("KUBEFAN_TEST_SCALE").is_ok_and(|scale| scale == "full")
}

fn skips_apiserver() -> bool {
    env::var_os("KUBEFAN_SKIP_APISERVER").is_some_and(|value| value == "1")
}

/// The requirements of a test, in the words of [`tests!`].
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    needs: Needs,
    /// The set, if `cargo test` leaves the test out.
    slow: Option<Slow>,
    /// Whether no other test may run at the same time.
    is_alone: bool,
}

/// The programs and the clock of a test.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Nothing but this machine.
    Nothing,
    /// A clock that advances only while every task waits: no network and no other process.
    PausedTime,
    /// etcd, kube-apiserver and kubectl, built from source or supplied by the user.
    ApiServer,
    /// etcd, kube-apiserver and kubectl, and the programs of [`assets::integrations`]. Building
    /// them does not count as time of the test either.
    ApiServerAndPrograms,
    /// etcd, kube-apiserver and kubectl, and python3 with its `venv` module.
    ApiServerAndPython,
}

/// The sets of the tests that `cargo test` leaves out. `.ci/run` runs a set if the change concerns
/// it, and `.ci/full` runs all.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slow {
    /// Failures of other processes, rights, limits.
    Faults,
    /// Programs that read through kubefan.
    Programs,
    /// Soaks of the clients, and their costs: minutes each, alone on the CPUs.
    Soaks,
    /// Manifests, dashboards and alerts.
    Deploy,
    /// The image, benchmarks, pages and examples.
    Release,
    /// Only at full scale.
    Large,
}

impl Kind {
    /// The start of a list of words.
    pub(crate) const fn new() -> Kind {
        Kind { needs: Needs::Nothing, slow: None, is_alone: false }
    }

    const fn needing(self, needs: Needs) -> Kind {
        Kind { needs, ..self }
    }

    /// Needs nothing but this machine.
    pub(crate) const fn local(self) -> Kind {
        self.needing(Needs::Nothing)
    }

    /// Runs in this process, on a paused clock.
    pub(crate) const fn paused(self) -> Kind {
        self.needing(Needs::PausedTime)
    }

    /// Needs the real kube-apiserver.
    pub(crate) const fn apiserver(self) -> Kind {
        self.needing(Needs::ApiServer)
    }

    /// Needs the real kube-apiserver, and the programs of the integrations.
    pub(crate) const fn programs(self) -> Kind {
        self.needing(Needs::ApiServerAndPrograms)
    }

    /// Needs the real kube-apiserver, and Python.
    pub(crate) const fn python(self) -> Kind {
        self.needing(Needs::ApiServerAndPython)
    }

    const fn slow(self, set: Slow) -> Kind {
        Kind { slow: Some(set), ..self }
    }

    /// Is slow, and shows how kubefan bears faults, attacks and limits.
    pub(crate) const fn slow_faults(self) -> Kind {
        self.slow(Slow::Faults)
    }

    /// Is slow, and runs programs that read through kubefan.
    pub(crate) const fn slow_programs(self) -> Kind {
        self.slow(Slow::Programs)
    }

    /// Takes minutes, and shows the cost of a client or its behaviour in hours of faults.
    pub(crate) const fn slow_soaks(self) -> Kind {
        self.slow(Slow::Soaks)
    }

    /// Is slow, and checks installed objects of a cluster.
    pub(crate) const fn slow_deploy(self) -> Kind {
        self.slow(Slow::Deploy)
    }

    /// Is slow, and checks published artifacts.
    pub(crate) const fn slow_release(self) -> Kind {
        self.slow(Slow::Release)
    }

    /// Shows nothing at a small size, or takes many minutes: runs with `KUBEFAN_TEST_SCALE=full`.
    pub(crate) const fn large(self) -> Kind {
        self.slow(Slow::Large)
    }

    /// Needs the CPUs for itself.
    pub(crate) const fn alone(self) -> Kind {
        Kind { is_alone: true, ..self }
    }

    fn needs_apiserver(self) -> bool {
        !matches!(self.needs, Needs::Nothing | Needs::PausedTime)
    }

    /// The words in brackets before the name, which filters match too: `apiserver`, `paused`;
    /// `slow` and the set if `cargo test` leaves it out, `large` if it runs at full scale only.
    fn label(self) -> String {
        let needs = match self.needs {
            Needs::Nothing => None,
            Needs::PausedTime => Some("paused"),
            Needs::ApiServer | Needs::ApiServerAndPrograms | Needs::ApiServerAndPython => Some("apiserver"),
        };
        let set = self.slow.map(|slow| match slow {
            Slow::Faults => "slow faults",
            Slow::Programs => "slow programs",
            Slow::Soaks => "slow soaks",
            Slow::Deploy => "slow deploy",
            Slow::Release => "slow release",
            Slow::Large => "large",
        });
        needs.into_iter().chain(set).collect::<Vec<_>>().join(" ")
    }

    /// The reason why the test cannot run here, if there is one.
    fn obstacle(self) -> Option<&'static str> {
        if self.needs_apiserver() && skips_apiserver() {
            return Some("KUBEFAN_SKIP_APISERVER=1");
        }
        if self.slow == Some(Slow::Large) && !is_full_scale() {
            return Some("it runs with KUBEFAN_TEST_SCALE=full");
        }
        if self.needs == Needs::ApiServerAndPython && !has_python() {
            return Some("python3 with its venv module is not installed");
        }
        None
    }
}

/// One registered test; made by [`tests!`].
pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) run: fn() -> Pin<Box<dyn Future<Output = ()>>>,
}

inventory::collect!(Test);

/// Registers the tests of a file, each group under the words of [`Kind`].
macro_rules! tests {
    ($($($word:ident)+: $($test:ident),+ $(,)?;)+) => {
        $($crate::harness::tests!(@group [$($word)+] $($test)+);)+
    };
    (@group $words:tt $($test:ident)+) => {
        $($crate::harness::tests!(@one $words concat!(module_path!(), "::", stringify!($test)), $test());)+
    };
    (@one [$($word:ident)+] $name:expr, $future:expr) => {
        inventory::submit! {
            $crate::harness::Test {
                name: $name,
                kind: $crate::harness::Kind::new()$(.$word())+,
                run: || Box::pin($future),
            }
        }
    };
}
pub(crate) use tests;

/// Runs every registered test that the command line selects. The flags are those of `cargo test`.
pub(crate) fn run() -> ExitCode {
    // reqwest is built without a crypto provider. kubefan installs one when it starts; the tests
    // must install theirs.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (mut arguments, filters) = arguments();
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    arguments.test_threads = arguments.test_threads.or(Some(AT_ONCE_PER_CPU * cpus));
    let mut tests: Vec<&'static Test> = inventory::iter::<Test>.into_iter().collect();
    tests.sort_by_key(|test| (test.kind.is_alone, test.name));
    let mut trials: Vec<Trial> = tests.into_iter().map(trial).collect();
    let is_selected = |trial: &Trial, filter: &String| {
        let name = format!("[{}] {}", trial.kind(), trial.name());
        if arguments.exact { filter == trial.name() || *filter == name } else { name.contains(filter.as_str()) }
    };
    if !filters.is_empty() {
        trials.retain(|trial| filters.iter().any(|filter| is_selected(trial, filter)));
    }
    let is_chosen = |trial: &&Trial| arguments.filter.as_ref().is_none_or(|filter| is_selected(trial, filter));
    let ignored = trials.iter().filter(is_chosen).filter(|trial| trial.has_ignored_flag()).count();
    if ignored > 0 && !arguments.ignored && !arguments.include_ignored && !arguments.list {
        println!("{ignored} tests are slow or skipped; -- --ignored runs them");
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    apiserver::end_shared();
    report_times();
    report_left_out();
    conclusion.exit_code()
}

/// The flags, and the filters if there are several: libtest-mimic takes one, and `cargo test` any
/// number.
fn arguments() -> (Arguments, Vec<String>) {
    let mut flags = Vec::new();
    let mut filters = Vec::new();
    let mut given = env::args();
    flags.extend(given.next());
    while let Some(argument) = given.next() {
        let takes_value = ["--test-threads", "--skip", "--color", "--format", "--logfile", "-Z"];
        if takes_value.contains(&argument.as_str()) {
            flags.push(argument);
            flags.extend(given.next());
        } else if argument.starts_with('-') {
            flags.push(argument);
        } else {
            filters.push(argument);
        }
    }
    if filters.len() == 1 {
        flags.append(&mut filters);
    }
    (Arguments::from_iter(flags), filters)
}

fn trial(test: &'static Test) -> Trial {
    let kind = test.kind;
    let run = move || match kind.obstacle() {
        Some(reason) => Ok(ignored(test, reason)),
        None => timed(test),
    };
    let is_left_out = kind.slow.is_some() && !is_full_scale();
    let is_ignored = is_left_out || (kind.needs_apiserver() && skips_apiserver());
    Trial::ignorable_test(name_of(test), run).with_kind(kind.label()).with_ignored_flag(is_ignored)
}

fn name_of(test: &Test) -> &'static str {
    test.name.trim_start_matches("integration::")
}

fn has_python() -> bool {
    let mut python = std::process::Command::new("python3");
    python.args(["-c", "import venv, ensurepip"]).output().is_ok_and(|output| output.status.success())
}

/// The tests that are running.
struct Running {
    tests: usize,
    is_alone: bool,
}

static RUNNING: Mutex<Running> = Mutex::new(Running { tests: 0, is_alone: false });
static ENDED: Condvar = Condvar::new();

/// The permit of a running test. Dropping it gives it back, also after a panic.
struct RunPermit;

impl RunPermit {
    /// Waits until the test may run: beside no test that runs alone, and if it runs alone beside
    /// none.
    fn acquire(kind: Kind) -> RunPermit {
        let mut running = RUNNING.lock().unwrap();
        while running.is_alone || (kind.is_alone && running.tests > 0) {
            running = ENDED.wait(running).unwrap();
        }
        *running = Running { tests: running.tests + 1, is_alone: kind.is_alone };
        RunPermit
    }
}

impl Drop for RunPermit {
    fn drop(&mut self) {
        let mut running = RUNNING.lock().unwrap();
        *running = Running { tests: running.tests - 1, is_alone: false };
        ENDED.notify_all();
    }
}

/// The time of each test that has run.
static TIMES: Mutex<Vec<(Duration, &'static str)>> = Mutex::new(Vec::new());

/// The reason why a test ends itself without a result.
struct Skipped(String);

/// Ends the calling test as ignored, because this machine lacks something that the test needs.
pub(crate) fn skip(reason: &str) -> ! {
    std::panic::resume_unwind(Box::new(Skipped(reason.to_owned())))
}

/// The parts of the tests that could not run here.
static LEFT_OUT: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Reports that a part of a test cannot run here, at the end of the run and to `.ci/run`.
pub(crate) fn leave_out(part: String) {
    LEFT_OUT.lock().unwrap().push(part);
}

/// The result of a test that cannot run here, which is reported as left out.
fn ignored(test: &Test, reason: &str) -> Completion {
    leave_out(format!("{}: {reason}", name_of(test)));
    Completion::ignored_with(reason)
}

#[expect(clippy::disallowed_methods, reason = "the time is only printed")]
fn timed(test: &'static Test) -> Result<Completion, Failed> {
    // The build of a program counts as running, so no test runs alone beside it.
    let _permit = RunPermit::acquire(test.kind);
    prepare(test.kind)?;
    let began = Instant::now();
    let result = std::panic::catch_unwind(|| block_on(test));
    TIMES.lock().unwrap().push((began.elapsed(), name_of(test)));
    let panic = match result {
        Ok(result) => return result.map(|()| Completion::Completed),
        Err(panic) => panic,
    };
    match panic.downcast::<Skipped>() {
        Ok(skipped) => Ok(ignored(test, &skipped.0)),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Builds the programs that a test needs. The first caller does; the others wait.
fn prepare(kind: Kind) -> Result<(), String> {
    if kind.needs_apiserver() {
        assets::get()?;
    }
    if kind.needs == Needs::ApiServerAndPrograms {
        assets::integrations()?;
    }
    Ok(())
}

fn block_on(test: &Test) -> Result<(), Failed> {
    use tokio::runtime::Builder;
    let is_paused = test.kind.needs == Needs::PausedTime;
    let runtime = if is_paused {
        Builder::new_current_thread().enable_all().start_paused(true).build()?
    } else {
        Builder::new_multi_thread().worker_threads(2).enable_all().build()?
    };
    let seconds_max = if is_paused {
        PAUSED_SECONDS_MAX
    } else if is_full_scale() {
        FULL_SCALE_SECONDS_MAX
    } else {
        TEST_SECONDS_MAX
    };
    let limit = Duration::from_secs(seconds_max);
    let finished = runtime.block_on(async { tokio::time::timeout(limit, (test.run)()).await });
    // A task that the test left running must not delay the other tests.
    runtime.shutdown_background();
    finished.map_err(|_| format!("did not finish within {} s", limit.as_secs()).into())
}

/// Prints the parts that could not run here, and writes them to the file `KUBEFAN_TESTS_LEFT_OUT`.
fn report_left_out() {
    let left_out = std::mem::take(&mut *LEFT_OUT.lock().unwrap());
    for part in &left_out {
        println!("left out: {part}");
    }
    if let Some(path) = env::var_os("KUBEFAN_TESTS_LEFT_OUT") {
        let lines: String = left_out.iter().map(|part| format!("{part}\n")).collect();
        std::fs::write(&path, lines).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

/// Prints the slowest tests, and writes the times of all to the file `KUBEFAN_TEST_TIMES`.
fn report_times() {
    let mut times = std::mem::take(&mut *TIMES.lock().unwrap());
    times.sort_by(|a, b| b.cmp(a));
    if let Some(path) = env::var_os("KUBEFAN_TEST_TIMES") {
        let lines = times.iter().map(|(time, name)| format!("{:.1}\t{name}\n", time.as_secs_f64()));
        let written = std::fs::File::options().create(true).append(true).open(&path);
        written
            .and_then(|mut file| file.write_all(lines.collect::<String>().as_bytes()))
            .expect("the times are written");
    }
    if times.len() > SLOWEST_NAMED {
        println!("the slowest:");
        for (time, name) in &times[..SLOWEST_NAMED] {
            println!("{:8.1} s  {name}", time.as_secs_f64());
        }
    }
}
