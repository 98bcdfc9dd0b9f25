//! Runs the real kubefan binary in front of an apiserver, on ports that it chooses. Dropping the
//! value kills it.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use super::{apiserver::ApiServer, process::Process, secrets, settings::Arguments, wait};

/// A running `kubefan serve`.
pub(crate) struct Kubefan {
    /// To read its memory or output, or to send it a signal.
    pub(crate) process: Process,
    /// The gRPC address.
    pub(crate) grpc_addr: SocketAddr,
    /// The address for health and metrics.
    pub(crate) admin_addr: SocketAddr,
    log: PathBuf,
    /// The file of its audit log.
    audit_log: Option<PathBuf>,
    /// The file of its settings, which it looks at again and again.
    _arguments: Arguments,
}

impl Kubefan {
    /// Starts kubefan as the administrator of `api` and waits until it is ready. `args` are
    /// appended to the listen flags. Settings without flags are written like `limits.readsMax=5`.
    pub(crate) async fn start(api: &ApiServer, args: &[&str]) -> Kubefan {
        let kubefan = Kubefan::spawn(&api.kubeconfig(), args).await;
        kubefan.ready().await;
        kubefan
    }

    /// Starts kubefan with any kubeconfig and waits until it listens.
    pub(crate) async fn spawn(kubeconfig: &Path, args: &[&str]) -> Kubefan {
        Kubefan::spawn_at(kubeconfig, "127.0.0.1:0", args).await
    }

    /// Like [`Self::spawn`], with the data port at an address that the test chooses. With a Unix
    /// socket, `grpc_addr` is not usable.
    pub(crate) async fn spawn_at(kubeconfig: &Path, listen: &str, args: &[&str]) -> Kubefan {
        Kubefan::spawn_command(Command::new(binary()), kubeconfig, listen, args).await
    }

    /// Like [`Self::spawn`], with another binary.
    pub(crate) async fn spawn_by(command: Command, kubeconfig: &Path, args: &[&str]) -> Kubefan {
        Kubefan::spawn_command(command, kubeconfig, "127.0.0.1:0", args).await
    }

    /// Like [`Self::spawn`]; the process that becomes kubefan first runs this command of the shell.
    pub(crate) async fn spawn_after(kubeconfig: &Path, shell: &str, args: &[&str]) -> Kubefan {
        let mut command = Command::new("sh");
        command.args(["-c", &format!(r#"{shell} && exec "$0" "$@""#), &binary()]);
        Kubefan::spawn_command(command, kubeconfig, "127.0.0.1:0", args).await
    }

    /// Like [`Self::spawn`], with another binary of kubefan.
    pub(crate) async fn spawn_program(program: &Path, kubeconfig: &Path, args: &[&str]) -> Kubefan {
        Kubefan::spawn_command(Command::new(program), kubeconfig, "127.0.0.1:0", args).await
    }

    /// Like [`Self::spawn`], with the default of `--access`.
    pub(crate) async fn spawn_as_given(kubeconfig: &Path, args: &[&str]) -> Kubefan {
        Kubefan::spawn_process(Command::new(binary()), kubeconfig, "127.0.0.1:0", args).await
    }

    /// Like [`Self::spawn_as_given`], over TLS with the server certificate of `api`, so callers are
    /// authorized.
    pub(crate) async fn spawn_over_tls(api: &ApiServer, kubeconfig: &Path, args: &[&str]) -> Kubefan {
        let certificate = api.tls_flags();
        let args: Vec<&str> = args.iter().copied().chain(certificate.iter().map(String::as_str)).collect();
        Kubefan::spawn_as_given(kubeconfig, &args).await
    }

    /// Like [`Self::spawn_as_given`], with environment variables.
    pub(crate) async fn spawn_with_variables(
        kubeconfig: &Path,
        args: &[&str],
        variables: &[(String, String)],
    ) -> Kubefan {
        let mut command = Command::new(binary());
        command.envs(variables.iter().cloned());
        Kubefan::spawn_process(command, kubeconfig, "127.0.0.1:0", args).await
    }

    /// Most tests are not about callers. So where their port has another default, all callers may
    /// read everything, unless `args` say something else.
    async fn spawn_command(command: Command, kubeconfig: &Path, listen: &str, args: &[&str]) -> Kubefan {
        let has = |flag: &str| args.iter().any(|arg| arg.starts_with(flag));
        let differs = has("--tls-cert-file") && !has("--access");
        let open: &[&str] = if differs { &["--access=local"] } else { &[] };
        Kubefan::spawn_process(command, kubeconfig, listen, &[args, open].concat()).await
    }

    async fn spawn_process(mut command: Command, kubeconfig: &Path, listen: &str, args: &[&str]) -> Kubefan {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kubefan-{}-{number}.log", std::process::id()));
        let arguments = Arguments::new(args);
        command
            .args(["serve", "--listen", listen, "--admin-listen", "127.0.0.1:0", "--kubeconfig"])
            .arg(kubeconfig)
            .args(&arguments.args);
        let mut process = Process::spawn("kubefan", &mut command, &log);
        let outcome = wait::try_until(wait::SOON, || {
            let printed = process.log();
            let address = |what| printed.lines().find_map(|line| line.strip_prefix(what)?.trim().parse().ok());
            let unix = || {
                printed
                    .contains("serving gRPC and the Kubernetes API on unix:")
                    .then(|| SocketAddr::from(([0, 0, 0, 0], 0)))
            };
            let data = address("kubefan: serving gRPC and the Kubernetes API on ").or_else(unix);
            let listening = data.zip(address("kubefan: serving admin on ")).map(Ok);
            let ended = process.exited().map(|status| Err(format!("ended with {status}")));
            async { listening.or(ended) }
        })
        .await
        .unwrap_or_else(|| Err("printed no addresses".to_owned()));
        match outcome {
            Ok((grpc_addr, admin_addr)) => {
                let audit_log = args.iter().find_map(|arg| arg.strip_prefix("--audit-log-path=")).map(PathBuf::from);
                Kubefan { process, grpc_addr, admin_addr, log, audit_log, _arguments: arguments }
            }
            Err(why) => panic!("kubefan serve {}: {why}; it printed:\n{}", args.join(" "), process.log()),
        }
    }

    /// Waits until /readyz succeeds.
    pub(crate) async fn ready(&self) {
        let ready = wait::try_until(READY_AT_MOST, || async {
            let (status, _) = self.admin("/readyz").await?;
            status.is_success().then_some(())
        });
        if ready.await.is_none() {
            let verbose = self.admin("/readyz?verbose").await;
            panic!("kubefan is not ready: {verbose:?}; it printed:\n{}", self.process.log());
        }
    }

    /// The admin port's answer to a GET, or `None` if there is none.
    pub(crate) async fn admin(&self, path: &str) -> Option<(reqwest::StatusCode, String)> {
        let response = reqwest::get(format!("http://{}{path}", self.admin_addr)).await.ok()?;
        let status = response.status();
        let text = response.text().await.ok()?;
        secrets::assert_none_in(path, &text);
        Some((status, text))
    }

    /// The metrics, outside of the runtime. `None` if it does not serve them any more.
    fn last_metrics(&mut self) -> Option<String> {
        if self.process.exited().is_some() {
            return None;
        }
        let mut stream = TcpStream::connect_timeout(&self.admin_addr, LAST_METRICS_AT_MOST).ok()?;
        stream.set_read_timeout(Some(LAST_METRICS_AT_MOST)).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// Content of its audit log. Empty without one, and once its directory is gone.
    fn audit_log(&self) -> String {
        // One test logs to a device that never ends.
        let file = self.audit_log.as_ref().filter(|path| path.is_file());
        file.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default()
    }

    /// The value of a line of the metrics, given with its labels.
    pub(crate) async fn metric(&self, line: &str) -> Option<f64> {
        let (_, text) = self.admin("/metrics").await?;
        text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
    }

    /// The lines of a metric, each with its labels and its value. `None` if there is no answer.
    pub(crate) async fn metric_lines(&self, name: &str) -> Option<Vec<String>> {
        let (_, text) = self.admin("/metrics").await?;
        let is_of = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        Some(text.lines().filter(is_of).map(str::to_owned).collect())
    }

    /// The sum of a metric's lines that contain `label`. `None` if there is no answer.
    pub(crate) async fn metric_sum(&self, name: &str, label: &str) -> Option<f64> {
        let lines = self.metric_lines(name).await?;
        Some(lines.iter().filter(|line| line.contains(label)).map(|line| value_of(line)).fold(0.0, |sum, it| sum + it))
    }

    /// Resources whose proof of freshness has failed or was late so far. kubefan may have passed on
    /// consistent reads of these.
    pub(crate) async fn unproved_resources(&self) -> BTreeSet<String> {
        let lines = self.metric_lines("kubefan_proofs_total").await.expect("metrics are served");
        let is_unproved = |line: &&String| {
            let has_result = [r#"result="behind""#, r#"result="failed""#].iter().any(|result| line.contains(result));
            has_result && value_of(line) > 0.0
        };
        let resource = |line: &String| Some(line.split_once(r#"resource=""#)?.1.split_once('"')?.0.to_owned());
        lines.iter().filter(is_unproved).filter_map(resource).collect()
    }

    /// The first lists that this process had to repeat. An apiserver that gets too little CPU ends
    /// watches of its own accord, also those that send a first state.
    pub(crate) async fn interrupted_lists(&self) -> usize {
        let first = self.metric_sum("kubefan_relists_total", r#"reason="initial""#).await;
        (first.expect("metrics are served") as usize).saturating_sub(1)
    }

    /// Waits until a line of the metrics has this value.
    pub(crate) async fn metric_becomes(&self, line: &str, value: f64) {
        let what = format!("{line} to be {value}");
        wait::until(&what, wait::SOON, || async { (self.metric(line).await == Some(value)).then_some(()) }).await;
    }
}

/// The value at the end of a line of the metrics.
pub(crate) fn value_of(line: &str) -> f64 {
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a metric has a value")
}

/// The path of the binary. Set the variable to a release build for measurements, or to the static
/// binary of the image to test that.
pub(crate) fn binary() -> String {
    std::env::var("KUBEFAN_TEST_BINARY").unwrap_or(env!("CARGO_BIN_EXE_kubefan").to_owned())
}

/// The exit code and output of a command.
#[derive(Debug)]
pub(crate) struct Ran {
    /// The exit code; `None` if a signal ended the command.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs the kubefan binary until it exits, without a kubeconfig and without kubefan's environment
/// variables.
pub(crate) async fn run(args: &[&str]) -> Ran {
    run_with(args, |_| {}).await
}

/// Like [`run`]; `prepare` can change the command before it starts.
pub(crate) async fn run_with(args: &[&str], prepare: impl FnOnce(&mut tokio::process::Command)) -> Ran {
    let arguments = Arguments::new(args);
    let mut command = tokio::process::Command::new(binary());
    command
        .args(&arguments.args)
        .env_clear()
        .env("HOME", "/nonexistent")
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    prepare(&mut command);
    secrets::remember_tokens_of(command.as_std().get_args().map(|argument| argument.to_string_lossy()));
    let output = tokio::time::timeout(EXITED_AT_MOST, command.output());
    let output = output.await.unwrap_or_else(|_| panic!("kubefan {} does not exit", args.join(" ")));
    let output = output.expect("kubefan starts");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let ran = Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
    assert!(!ran.stderr.contains("panicked"), "kubefan {}: {ran:?}", args.join(" "));
    let what = format!("what kubefan {} prints", args.join(" "));
    secrets::assert_none_in(&what, &format!("{}{}", ran.stdout, ran.stderr));
    ran
}

const READY_AT_MOST: Duration = Duration::from_secs(180);
/// For whole commands, such as a benchmark by a debug build on a busy machine.
const EXITED_AT_MOST: Duration = Duration::from_secs(300);

/// Maximum time of the last metrics of a process. A test may have stopped it.
const LAST_METRICS_AT_MOST: Duration = Duration::from_secs(1);

impl Drop for Kubefan {
    fn drop(&mut self) {
        let metrics = self.last_metrics().unwrap_or_default();
        self.process.kill9();
        let panicked = self.process.log().contains("panicked");
        assert!(!panicked || std::thread::panicking(), "kubefan panicked:\n{}", self.process.log());
        for (what, text) in
            [("its log", self.process.log()), ("its audit log", self.audit_log()), ("/metrics", metrics)]
        {
            secrets::assert_none_in(what, &text);
        }
        if std::thread::panicking() {
            // Part of the failure report.
            eprintln!("kubefan printed:\n{}", self.process.log());
        }
        let _ = std::fs::remove_file(&self.log);
    }
}
