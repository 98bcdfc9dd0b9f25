//! Runs async tests as `cargo test` runs ordinary tests: in parallel, filtered by name, each in its
//! own runtime.
//!
//! A test is an `async fn()` that panics when its promise is broken. Each file registers its tests
//! by name in its `TESTS` list, grouped by their requirements. A test that is in no list is dead
//! code, which the lints deny.
//!
//! ```ignore
//! pub(crate) const TESTS: &[Test] = tests! {
//!     apiserver: a_pod_is_served, a_relist_leaves_a_marked_gap;   // needs the real kube-apiserver
//!     local: a_bad_flag_is_named;                                 // needs nothing
//!     paused: a_429_is_waited_out;                                // in this process, on a paused clock
//! };
//! ```
//!
//! With `KUBEFAN_SKIP_APISERVER=1`, tests that need the real apiserver count as ignored; they never
//! disappear silently. A test that hangs fails under its own name after [`TEST_SECONDS_MAX`], so
//! that one hang cannot hide the results of the other tests.

use std::{env, future::Future, io::Write, pin::Pin, process::ExitCode, time::Duration};

use libtest_mimic::{Arguments, Failed, Trial};

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
mod rest;
pub(crate) mod resuming;
pub(crate) mod rig;
pub(crate) mod servers;
pub(crate) mod simulated;
pub(crate) mod tools;
pub(crate) mod wait;
pub(crate) mod writes;

/// Time limit of a test, without the duration of the soak. Building the real apiserver before the
/// first test does not count.
const TEST_SECONDS_MAX: u64 = 600;

/// Time limit of a test on a paused clock, where waiting takes no real time.
const PAUSED_SECONDS_MAX: u64 = 24 * 3600;

/// Time limit of a test at full scale, with the builds of its programs.
const FULL_SCALE_SECONDS_MAX: u64 = 2_400;

/// Whether the large form of a test is asked for: `KUBEFAN_TEST_SCALE=full`.
pub(crate) fn is_full_scale() -> bool {
    env::var("KUBEFAN_TEST_SCALE").is_ok_and(|scale| scale == "full")
}

/// The duration of the soak test, in seconds: `KUBEFAN_SOAK_SECONDS`, and 30 without it.
pub(crate) fn soak_seconds() -> u64 {
    env::var("KUBEFAN_SOAK_SECONDS").map_or(30, |text| text.parse().expect("KUBEFAN_SOAK_SECONDS is a number"))
}

/// What a test requires.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// etcd, kube-apiserver and kubectl, built from source or supplied by the user.
    ApiServer,
    /// The same, and the programs of [`assets::integrations`]. Building them does not count as time
    /// of the test either.
    ApiServerAndPrograms,
    /// etcd, kube-apiserver and kubectl, and python3 with its `venv` module.
    ApiServerAndPython,
    /// The same, and minutes: programs that only this test builds, or a size without which the test
    /// shows nothing. It runs with `KUBEFAN_TEST_SCALE=full`.
    ApiServerAtFullScale,
    /// Nothing but this machine.
    Nothing,
    /// Nothing but a paused clock, which advances only while every task waits: no network and no
    /// other process.
    PausedTime,
}

/// One registered test; made by [`tests!`].
#[derive(Clone, Copy)]
pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) needs: Needs,
    pub(crate) run: fn() -> Pin<Box<dyn Future<Output = ()>>>,
}

/// Lists the tests of a file by requirement: `apiserver:`, `programs:`, `full:`, `python:`,
/// `local:` and `paused:`, in this order. Each group is optional and ends with a semicolon.
macro_rules! tests {
    ($(apiserver: $($real:ident),+ $(,)?;)? $(programs: $($programs:ident),+ $(,)?;)? $(full: $($full:ident),+ $(,)?;)? $(python: $($python:ident),+ $(,)?;)? $(local: $($local:ident),+ $(,)?;)?
     $(paused: $($paused:ident),+ $(,)?;)?) => {
        &[
            $($($crate::harness::tests!(@one $real ApiServer),)+)?
            $($($crate::harness::tests!(@one $programs ApiServerAndPrograms),)+)?
            $($($crate::harness::tests!(@one $full ApiServerAtFullScale),)+)?
            $($($crate::harness::tests!(@one $python ApiServerAndPython),)+)?
            $($($crate::harness::tests!(@one $local Nothing),)+)?
            $($($crate::harness::tests!(@one $paused PausedTime),)+)?
        ]
    };
    (@one $test:ident $needs:ident) => {
        $crate::harness::Test {
            name: concat!(module_path!(), "::", stringify!($test)),
            needs: $crate::harness::Needs::$needs,
            run: || Box::pin($test()),
        }
    };
}
pub(crate) use tests;

/// Runs every listed test that the command line selects. The flags are those of `cargo test`.
pub(crate) fn run(lists: &[&[Test]]) -> ExitCode {
    // reqwest is built without a crypto provider. kubefan installs one when it starts; the tests
    // must install theirs.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let skip_apiserver = env::var_os("KUBEFAN_SKIP_APISERVER").is_some_and(|value| value == "1");
    let trials = lists.iter().copied().flatten().map(|&test| trial(test, skip_apiserver)).collect();
    let conclusion = libtest_mimic::run(&Arguments::from_args(), trials);
    apiserver::end_shared();
    conclusion.exit_code()
}

fn trial(test: Test, skip_apiserver: bool) -> Trial {
    let name = test.name.trim_start_matches("integration::");
    let trial = Trial::test(name, move || block_on(test));
    match test.needs {
        Needs::ApiServer | Needs::ApiServerAndPrograms => {
            trial.with_kind("apiserver").with_ignored_flag(skip_apiserver)
        }
        Needs::ApiServerAtFullScale => {
            trial.with_kind("apiserver").with_ignored_flag(skip_apiserver || !is_full_scale())
        }
        Needs::ApiServerAndPython => {
            let python = has_python();
            if !python {
                // Bypasses libtest's output capture, because a skipped test must be visible.
                let _ = writeln!(std::io::stderr(), "{name} is skipped: python3 with its venv module is not installed");
            }
            trial.with_kind("apiserver").with_ignored_flag(skip_apiserver || !python)
        }
        Needs::Nothing => trial,
        Needs::PausedTime => trial.with_kind("paused"),
    }
}

fn has_python() -> bool {
    let mut python = std::process::Command::new("python3");
    python.args(["-c", "import venv, ensurepip"]).output().is_ok_and(|output| output.status.success())
}

fn block_on(test: Test) -> Result<(), Failed> {
    if !matches!(test.needs, Needs::Nothing | Needs::PausedTime) {
        assets::get()?;
    }
    if test.needs == Needs::ApiServerAndPrograms {
        assets::integrations()?;
    }
    use tokio::runtime::Builder;
    let paused = test.needs == Needs::PausedTime;
    let runtime = match paused {
        true => Builder::new_current_thread().enable_all().start_paused(true).build()?,
        false => Builder::new_multi_thread().worker_threads(2).enable_all().build()?,
    };
    let seconds_max = match test.needs {
        Needs::PausedTime => PAUSED_SECONDS_MAX,
        _ if is_full_scale() => FULL_SCALE_SECONDS_MAX,
        _ => TEST_SECONDS_MAX + soak_seconds(),
    };
    let limit = Duration::from_secs(seconds_max);
    let finished = runtime.block_on(async { tokio::time::timeout(limit, (test.run)()).await });
    // A task that the test left running must not delay the other tests.
    runtime.shutdown_background();
    finished.map_err(|_| format!("did not finish within {} s", limit.as_secs()).into())
}
