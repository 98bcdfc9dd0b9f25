//! `kubefan demo`: shows the benefit of kubefan in half a minute, without a cluster. This file has
//! the flags, the choice between live view and plain lines, and the end; [`kubefan_demo`] does
//! the rest.

use std::{
    env,
    io::{self, IsTerminal, Stdout, Write, stdout},
    time::Duration,
};

use clap::Args;
use kubefan_app::config::{self, ListenAddress, LogFormat, ServeConfig};
use kubefan_demo::{
    Demo, DemoOptions, METER_INTERVAL, Meter, hints,
    live::{self, Key, Live},
    plain::Plain,
};
use kubefan_telemetry::logging::LogGuard;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use super::error::CliError;

/// Show what kubefan does, with a simulated apiserver in this process
#[derive(Debug, Args)]
#[command(
    after_help = "For a few seconds every subscriber watches the apiserver itself. Then all of them watch kubefan, which watches \
    the apiserver once. At the end the demo compares the counts of both. It needs no cluster and no network."
)]
pub(super) struct DemoArgs {
    /// Pods in the simulated cluster, of 3 to 6 kB each
    #[arg(long, value_name = "COUNT", default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    objects: u32,

    /// Subscribers, each with its own connection: of every twenty, one watches everything, five
    /// watch by label and fourteen by node
    #[arg(long, value_name = "COUNT", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    subscribers: u32,

    /// Changes per second
    #[arg(long, value_name = "COUNT", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rate: u32,

    /// End after this time, such as 30s or 5m; 0 runs until ctrl-C
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    duration: DurationLimit,

    /// Serve gRPC on this address, which must be local to this machine, or on unix:PATH; port 0
    /// picks a free port
    #[arg(long, value_name = "ADDRESS", default_value_t = ServeConfig::default().serving.listen, value_parser = parse_local)]
    listen: ListenAddress,

    /// Serve health, metrics and the status page on this address
    #[arg(long, value_name = "ADDRESS", default_value_t = ServeConfig::default().serving.admin_listen, value_parser = parse_local)]
    admin_listen: ListenAddress,

    /// The same seed makes the same pods and changes
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
}

/// A duration; `None` for no end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DurationLimit(Option<Duration>);

fn parse_duration(text: &str) -> Result<DurationLimit, String> {
    let least = Duration::from_secs(1);
    let most = Duration::from_secs(24 * 3600);
    match text.parse::<config::Duration>() {
        _ if text == "0" => Ok(DurationLimit(None)),
        Ok(duration) if duration.0.is_zero() => Ok(DurationLimit(None)),
        Ok(duration) if (least..=most).contains(&duration.0) => Ok(DurationLimit(Some(duration.0))),
        _ => Err("write it like 30s or 5m, from 1s to 24h; 0 runs until ctrl-C".to_owned()),
    }
}

fn parse_local(text: &str) -> Result<ListenAddress, String> {
    let address: ListenAddress = text.parse().map_err(|error: config::listen::InvalidAddress| error.to_string())?;
    if address.is_local() {
        Ok(address)
    } else {
        Err("the demo only serves this machine; listen on 127.0.0.1, [::1] or unix:PATH".to_owned())
    }
}

impl DemoArgs {
    fn options(self) -> Result<DemoOptions, CliError> {
        let count = |number: u32| usize::try_from(number).map_err(CliError::plain);
        let Self { listen, admin_listen, .. } = self;
        if listen == admin_listen && !matches!(listen, ListenAddress::Tcp(address) if address.port() == 0) {
            let problem = format!("--listen and --admin-listen are both {listen}; give each its own address");
            return Err(CliError::Plain(problem));
        }
        let mut default = DemoOptions::default();
        default.serve.serving.listen = listen;
        default.serve.serving.admin_listen = admin_listen;
        Ok(DemoOptions {
            objects: count(self.objects)?,
            subscribers: count(self.subscribers)?,
            rate: self.rate,
            duration: self.duration.0,
            seed: self.seed,
            serve: default.serve,
        })
    }
}

pub(super) fn run(args: DemoArgs) -> Result<(), CliError> {
    let options = args.options()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CliError::plain)?;
    let result = runtime.block_on(show(options));
    // All tasks have ended or were asked to end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn show(options: DemoOptions) -> Result<(), CliError> {
    let endless = options.duration.is_none();
    let demo = Demo::bind(options).await.map_err(CliError::plain)?;
    let (data, admin) = demo.bound();
    let program = hints::program();
    let hints = hints::lines(&program, data, admin);
    let apiserver = demo.apiserver();
    writeln!(
        stdout(),
        "simulated apiserver on {apiserver}\nkubefan on {data} after some seconds, its admin port on {admin}"
    )?;

    let stop = Stop::new()?;
    let mut meter = demo.meter();
    let mut screen = Screen::open(&hints);
    let mut running = tokio::spawn(demo.run(stop.token.clone()));
    let mut ticks = interval(METER_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let ended = loop {
        tokio::select! {
            ended = &mut running => break ended,
            _ = ticks.tick() => screen.show(&mut meter, &stop)?,
        }
    };
    // The terminal must be restored before anything else is printed.
    drop(screen);
    let summary = ended.map_err(CliError::plain)?.map_err(CliError::plain)?;
    write!(stdout(), "\n{summary}")?;
    if !endless {
        writeln!(stdout(), "\nto explore it, run {program} demo --duration 0 and, in another terminal:")?;
        for hint in &hints {
            writeln!(stdout(), "  {hint}")?;
        }
    }
    summary.failure().map_or(Ok(()), |failure| Err(CliError::Plain(failure)))
}

/// The first ctrl-C, SIGTERM or stop key ends the demo with its summary; the second ends the
/// process at once.
struct Stop {
    token: CancellationToken,
}

impl Stop {
    fn new() -> io::Result<Self> {
        let stop = Self { token: CancellationToken::new() };
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let signalled = Self { token: stop.token.clone() };
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => signalled.request(),
                    _ = terminate.recv() => signalled.request(),
                }
            }
        });
        Ok(stop)
    }

    fn request(&self) {
        if self.token.is_cancelled() {
            live::restore();
            std::process::exit(130);
        }
        self.token.cancel();
    }
}

enum Screen {
    Live(Live),
    /// The log ends with the screen.
    Plain {
        plain: Plain<Stdout>,
        _log: Option<LogGuard>,
    },
}

impl Screen {
    /// Opens the live view if stdout is a terminal that supports it.
    fn open(hints: &[String]) -> Self {
        let dumb = env::var_os("TERM").is_none_or(|terminal| terminal.is_empty() || terminal == "dumb");
        if stdout().is_terminal()
            && !dumb
            && let Ok(live) = Live::open(hints.to_vec())
        {
            return Self::Live(live);
        }
        // Log lines would garble the live view. With plain lines they can explain an unusual
        // number. If logging was initialized before, it is left alone.
        let log = kubefan_telemetry::logging::init(LogFormat::Text, "warn").ok();
        Self::Plain { plain: Plain::new(stdout(), hints.to_vec()), _log: log }
    }

    fn show(&mut self, meter: &mut Meter, stop: &Stop) -> io::Result<()> {
        let sampled = meter.read();
        match self {
            Self::Plain { plain, .. } => plain.show(meter, sampled),
            Self::Live(live) => {
                if live.key()? == Some(Key::Stop) {
                    stop.request();
                }
                live.show(meter)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        demo: DemoArgs,
    }

    fn parse(words: &[&str]) -> Result<DemoOptions, String> {
        let only = Only::try_parse_from(["demo"].iter().chain(words)).map_err(|error| error.to_string())?;
        only.demo.options().map_err(|error| error.to_string())
    }

    #[test]
    fn no_flags_are_the_default_demo() {
        assert_eq!(format!("{:?}", parse(&[]).unwrap()), format!("{:?}", DemoOptions::default()));
    }

    #[test]
    fn a_duration_of_zero_means_no_end() {
        let duration = |text: &str| parse(&[&format!("--duration={text}")]).map(|options| options.duration);
        assert_eq!([duration("0"), duration("0s")], [Ok(None), Ok(None)]);
        assert_eq!(duration("90s"), Ok(Some(Duration::from_secs(90))));
        for text in ["10ms", "25h", "soon", "-3s"] {
            assert!(duration(text).unwrap_err().contains("--duration"), "{text}");
        }
    }

    #[test]
    fn the_demo_accepts_only_local_addresses_and_values_within_its_limits() {
        for words in [
            ["--listen", "0.0.0.0:7443"],
            ["--admin-listen", ":7444"],
            ["--objects", "0"],
            ["--subscribers", "10001"],
            ["--rate", "0"],
        ] {
            let error = parse(&words).unwrap_err();
            assert!(error.contains(words[0]), "{error}");
        }
        let error = parse(&["--admin-listen", "127.0.0.1:7443"]).unwrap_err();
        assert!(error.contains("--listen and --admin-listen are both 127.0.0.1:7443"), "{error}");
    }
}
