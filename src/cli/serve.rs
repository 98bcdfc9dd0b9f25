//! `kubefan serve`: merges flags, environment and file into one configuration, and runs until it is
//! signalled to stop.

use std::{env, path::PathBuf};

use clap::{Args, Command};
use kubefan_app::{
    self,
    config::{
        self, ConfigError, ConfigFile, SecondVariable, ServeConfig, ServeOptions, moved, traces::PROTOCOL_VARIABLE,
    },
    reload::WatchedFile,
};

use super::{
    error::CliError,
    given::{Given, is_set},
    shutdown::{hangups, shutdown},
};

/// The number of tasks that a busy thread runs before it polls for new I/O. With tokio's 61, a
/// request that arrives waits for up to 61 tasks of other clients, and each of these may test a
/// selector with a thousand values.
const EVENT_INTERVAL: u32 = 8;

/// Watch the apiserver once, and serve any number of subscribers
#[derive(Debug, Args)]
#[command(
    after_help = "Precedence: a flag, then its environment variable, then the file of --config, then the default. The file \
    is YAML with `apiVersion: kubefan.dev/v1alpha1`, `kind: ServeConfiguration`, and the flags' names in camelCase (`resources` and \
    `namespaces` are lists). It alone has further limits and tuning, under `limits` and `tuning`: docs/configuration.md describes \
    them."
)]
pub(super) struct ServeArgs {
    /// Read the configuration from this file
    #[arg(long, env = "KUBEFAN_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(flatten)]
    options: ServeOptions,
}

/// Adds the defaults to the help texts.
pub(super) fn with_defaults(command: Command) -> Command {
    config::default_texts().into_iter().fold(command, |command, (name, default)| {
        command.mut_arg(name, |arg| {
            let help = format!("{} [default: {default}]", arg.get_help().cloned().unwrap_or_default());
            arg.help(help)
        })
    })
}

/// Reads an option from the second name of its variable where only that is set. The parser knows
/// one name.
pub(super) fn with_second_variables(command: Command) -> Command {
    let used = config::second_variables().into_iter().filter(|names| !is_set(names.first) && is_set(names.second));
    used.fold(command, |command, names| command.mut_arg(names.field, |arg| arg.env(names.second)))
}

/// Runs until a signal. `variables` are the environment variables that a command reads.
pub(super) fn run(args: ServeArgs, variables: &[String], given: &Given<'_>) -> Result<(), CliError> {
    let (mut config, watched) = configuration(args, given)?;
    config.traces.is_of_variable(given.variable_of("--otlp-endpoint").as_deref());
    let _log =
        kubefan_telemetry::logging::init(config.logging.format, &config.logging.level).map_err(CliError::Plain)?;
    for message in unknown_variables(variables) {
        tracing::warn!("{message}");
    }
    let runtime = runtime_builder().build().map_err(CliError::plain)?;
    let served = runtime.block_on(async {
        let announce = |signal| tracing::info!(signal, "draining; ctrl-C again to stop at once");
        let shutdown = shutdown(announce).map_err(CliError::plain)?;
        let hangups = hangups().map_err(CliError::plain)?;
        kubefan_app::run(config, watched, shutdown, hangups).await.map_err(CliError::plain)
    });
    // A look-up of a name or a credential plugin may hang, and must not be waited for.
    runtime.shutdown_background();
    served
}

/// Configures the runtime of the proxy.
fn runtime_builder() -> tokio::runtime::Builder {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.enable_all().event_interval(EVENT_INTERVAL);
    runtime
}

/// The configuration that flags, environment and file make, and the file that it is from.
///
/// # Errors
/// The reason why `serve` would not start with it, in one line.
pub(super) fn configuration(
    args: ServeArgs,
    given: &Given<'_>,
) -> Result<(ServeConfig, Option<WatchedFile>), CliError> {
    let is_twice = |names: &&SecondVariable| !names.is_foreign && is_set(names.first) && is_set(names.second);
    let removed = moved::variables().find(|(variable, _)| is_set(variable));
    if let Some((variable, place)) = removed.and_then(|(variable, flag)| Some((variable, moved::flag(&flag)?))) {
        return Err(CliError::Plain(format!("{variable} is now {place}")));
    }
    if let Some(names) = config::second_variables().iter().find(is_twice) {
        let message = format!("{} and {} mean the same; set only one of them", names.first, names.second);
        return Err(CliError::Plain(message));
    }
    configure(args).map_err(|error| describe(error, |flag| given.variable_of(flag)))
}

/// Describes the environment variables that look like options, and that no command reads.
pub(super) fn unknown_variables(variables: &[String]) -> Vec<String> {
    let known: Vec<_> = variables.iter().map(String::as_str).collect();
    // A variable whose name or value is not UTF-8 is no misspelt name.
    let set = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    config::environment::unknown(set, &known)
}

/// The configuration, and the file that it is from.
fn configure(mut args: ServeArgs) -> Result<(ServeConfig, Option<WatchedFile>), ConfigError> {
    args.options.traces.read_protocol(env::var(PROTOCOL_VARIABLE).ok().as_deref());
    let Some(path) = args.config else { return Ok((args.options.validate()?, None)) };
    let watched = WatchedFile::read(ConfigFile::new(path, args.options))?;
    Ok((watched.config().clone(), Some(watched)))
}

/// The error, with the environment variable that set the value in place of its flag.
fn describe(error: ConfigError, variable_of: impl Fn(&str) -> Option<String>) -> CliError {
    let text = error.to_string();
    let flag = text.split(' ').next().unwrap_or_default();
    let is_of_a_value = matches!(error, ConfigError::Value { .. } | ConfigError::File { .. });
    match variable_of(flag).filter(|_| is_of_a_value) {
        Some(variable) => CliError::Plain(text.replacen(flag, &variable, 1)),
        None => CliError::Plain(text),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    use clap::Parser;
    use tokio::{net::UnixStream, task::JoinSet};

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        serve: ServeArgs,
    }

    fn parse(words: &[&str]) -> Result<ServeConfig, String> {
        let words = ["serve"].iter().chain(words);
        let only = Only::try_parse_from(words).map_err(|error| error.to_string())?;
        configure(only.serve).map(|(config, _)| config).map_err(|error| describe(error, |_| None).to_string())
    }

    /// Counts the ready tasks that run before one whose socket has become readable.
    async fn tasks_before_one_that_is_woken() -> u32 {
        let (near, far) = UnixStream::pair().unwrap();
        let ran = Arc::new(AtomicU32::new(0));
        let before = ran.clone();
        let woken = tokio::spawn(async move {
            near.readable().await.unwrap();
            before.load(Ordering::Relaxed)
        });
        // Meanwhile the task above starts to wait.
        far.writable().await.unwrap();
        assert_eq!(far.try_write(b"x").unwrap(), 1);
        let mut ready = JoinSet::new();
        for _ in 0..200 {
            let ran = ran.clone();
            ready.spawn(async move { ran.fetch_add(1, Ordering::Relaxed) });
        }
        let before = woken.await.unwrap();
        ready.join_all().await;
        before
    }

    #[test]
    fn a_request_that_arrives_does_not_wait_for_all_that_others_have_sent() {
        let runtime = runtime_builder().worker_threads(1).build().unwrap();
        let most = async {
            let mut most = 0;
            for _ in 0..20 {
                most = most.max(tasks_before_one_that_is_woken().await);
            }
            most
        };
        let most = runtime.block_on(runtime.spawn(most)).unwrap();
        assert!(most <= 2 * EVENT_INTERVAL, "{most} of 200 tasks ran before");
    }

    #[test]
    fn a_flag_overrides_the_file_and_the_file_overrides_the_default() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kubefan.yaml");
        let text = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\nresources: [nodes]\nlogLevel: warn\ntuning: {pageSize: 11}\n";
        std::fs::write(&file, text).unwrap();
        let config = parse(&[
            "--config",
            file.to_str().unwrap(),
            "--log-level=error",
            "--resource=pods,deploy",
            "--resource",
            "svc",
        ])
        .unwrap();
        assert_eq!(config.cache.resources, ["pods", "deploy", "svc"].map(Into::into));
        assert_eq!((config.logging.level.as_str(), config.upstream.page_size), ("error", 11));
        assert_eq!(config.cache.ring_events_max, ServeConfig::default().cache.ring_events_max);
    }

    #[test]
    fn a_broken_file_and_a_contradiction_are_one_line_errors() {
        let error = parse(&["--config", "/does/not/exist.yaml"]).unwrap_err();
        assert_eq!(error, "error: --config /does/not/exist.yaml: No such file or directory (os error 2)");
        let error = parse(&["--listen", "0.0.0.0:7443", "--resource=pods"]).unwrap_err();
        assert!(error.starts_with("error: --listen 0.0.0.0:7443 can be reached") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_wrong_value_of_a_variable_is_named_by_the_variable() {
        let variable = |flag: &str| Some(format!("KUBEFAN_{}", flag.strip_prefix("--")?.to_uppercase()));
        let error = |words: &[&str]| {
            let words = ["serve"].iter().chain(words);
            describe(configure(Only::parse_from(words).serve).err().unwrap(), variable).to_string()
        };
        assert_eq!(error(&["--resource=a..b"]), "error: KUBEFAN_RESOURCE \"a..b\": no name of a resource");
        assert!(error(&["--config=/does/not/exist"]).starts_with("error: KUBEFAN_CONFIG /does/not/exist: No such"));
        let contradiction = error(&["--tls-cert-file=x.pem", "--resource=pods"]);
        assert!(contradiction.starts_with("error: --tls-cert-file needs"), "two options: {contradiction}");
    }

    #[test]
    fn the_help_shows_every_default_and_every_flag_has_an_environment_variable() {
        let command = with_defaults(<Only as clap::CommandFactory>::command());
        let named: Vec<&str> = config::default_texts().iter().map(|(name, _)| *name).collect();
        for arg in command.get_arguments().filter(|arg| !["help", "version"].contains(&arg.get_id().as_str())) {
            let id = arg.get_id().as_str();
            let variable = arg.get_env().unwrap_or_else(|| panic!("{id} has no variable")).to_string_lossy();
            assert_eq!(variable, format!("KUBEFAN_{}", arg.get_long().unwrap().to_uppercase().replace('-', "_")));
            let help = arg.get_help().unwrap().to_string();
            assert!(help.matches("[default:").count() <= 1, "{id}: {help}");
            assert_eq!(
                named.contains(&id),
                help.contains("[default:")
                    && ![
                        "memory_max",
                        "max_staleness",
                        "on_demand",
                        "api_audiences",
                        "upstream_token_file",
                        "upstream_key_file",
                        "otlp_endpoint",
                        "access",
                        "audit_log_path",
                        "client_ca_file"
                    ]
                    .contains(&id),
                "{id}: {help}"
            );
        }
    }
}
