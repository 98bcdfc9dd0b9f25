//! `kubefan demo`: what kubefan is for, in half a minute and without a cluster. What is shown comes from [`kubefan_demo`]; here are
//! the flags, the choice between the live view and plain lines, and the end.

use std::{
    env,
    io::{self, IsTerminal, Stdout, Write, stdout},
    time::Duration,
};

use clap::Args;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use super::CliError;
use kubefan_demo::{
    Demo, DemoOptions, METER_INTERVAL, Meter, hints,
    live::{self, Key, Live},
    plain::Plain,
};
use kubefan_proxy::{
    config::{self, ListenAddress, LogFormat, ServeConfig},
    telemetry,
};

/// Show what kubefan does, on a simulated apiserver in this process
#[derive(Debug, Args)]
#[command(
    after_help = "First every subscriber watches the apiserver itself, for a few seconds; then all of them watch kubefan, which \
    watches the apiserver once. At the end both are compared, in counts. Nothing but this machine is needed."
)]
pub(super) struct DemoArgs {
    /// Pods in the simulated cluster, of 3 to 6 kB each
    #[arg(long, value_name = "COUNT", default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    objects: u32,

    /// Subscribers, each with a connection of its own: of twenty one watches everything, five a label, the others a node
    #[arg(long, value_name = "COUNT", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    subscribers: u32,

    /// Changes per second
    #[arg(long, value_name = "COUNT", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rate: u32,

    /// End after this long, such as 30s or 5m; 0 for until ctrl-C
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    duration: Limit,

    /// Serve gRPC here: an address of this machine only, or unix:PATH; port 0 lets the system choose
    #[arg(long, value_name = "ADDRESS", default_value_t = ServeConfig::default().listen, value_parser = parse_local)]
    listen: ListenAddress,

    /// Serve health, metrics and the status page here
    #[arg(long, value_name = "ADDRESS", default_value_t = ServeConfig::default().admin_listen, value_parser = parse_local)]
    admin_listen: ListenAddress,

    /// The same seed makes the same pods and changes
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
}

/// How long; `None` for without end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit(Option<Duration>);

fn parse_duration(text: &str) -> Result<Limit, String> {
    let (least, most) = (Duration::from_secs(1), Duration::from_secs(24 * 3600));
    match text.parse::<config::Duration>() {
        _ if text == "0" => Ok(Limit(None)),
        Ok(duration) if duration.0.is_zero() => Ok(Limit(None)),
        Ok(duration) if (least..=most).contains(&duration.0) => Ok(Limit(Some(duration.0))),
        _ => Err("write it like 30s or 5m, from 1s to 24h; 0 for until ctrl-C".to_owned()),
    }
}

fn parse_local(text: &str) -> Result<ListenAddress, String> {
    let address: ListenAddress = text.parse().map_err(|error: config::listen::InvalidAddress| error.to_string())?;
    match address.is_local() {
        true => Ok(address),
        false => Err("the demo is for this machine only; listen on 127.0.0.1, [::1] or unix:PATH".to_owned()),
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
        let default = DemoOptions::default();
        Ok(DemoOptions {
            objects: count(self.objects)?,
            subscribers: count(self.subscribers)?,
            rate: self.rate,
            duration: self.duration.0,
            seed: self.seed,
            serve: ServeConfig { listen, admin_listen, ..default.serve },
        })
    }
}

pub(super) fn run(args: DemoArgs) -> Result<(), CliError> {
    let options = args.options()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CliError::plain)?;
    let result = runtime.block_on(show(options));
    // Everything that was started has ended, or was told to.
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
    writeln!(stdout(), "simulated apiserver on {apiserver}\nkubefan on {data}, its admin port on {admin}")?;

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
    // The terminal is given back before anything else is written.
    drop(screen);
    let contrast = ended.map_err(CliError::plain)?.map_err(CliError::plain)?;
    write!(stdout(), "\n{contrast}")?;
    if !endless {
        writeln!(stdout(), "\nto look around, run {program} demo --duration 0 and, in another terminal:")?;
        hints.iter().try_for_each(|hint| writeln!(stdout(), "  {hint}"))?;
    }
    contrast.failure().map_or(Ok(()), |failure| Err(CliError::Plain(failure)))
}

/// The first ctrl-C, SIGTERM or key ends the demo with its summary, the second where it stands.
struct Stop {
    token: CancellationToken,
}

impl Stop {
    fn new() -> io::Result<Self> {
        let stop = Self { token: CancellationToken::new() };
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let signalled = Self { token: stop.token.clone() };
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => signalled.ask(),
                    _ = terminate.recv() => signalled.ask(),
                }
            }
        });
        Ok(stop)
    }

    fn ask(&self) {
        if self.token.is_cancelled() {
            live::restore();
            std::process::exit(130);
        }
        self.token.cancel();
    }
}

enum Screen {
    Live(Live),
    Plain(Plain<Stdout>),
}

impl Screen {
    /// The live view where there is a terminal that can show it.
    fn open(hints: &[String]) -> Self {
        let dumb = env::var_os("TERM").is_none_or(|terminal| terminal.is_empty() || terminal == "dumb");
        if stdout().is_terminal()
            && !dumb
            && let Ok(live) = Live::open(hints.to_vec())
        {
            return Self::Live(live);
        }
        // In the live view log lines would tear what is drawn; here they explain a number that is out of line. Where logging was
        // started before, it stays as it is.
        let _ = telemetry::tracing::init(LogFormat::Text, "warn");
        Self::Plain(Plain::new(stdout(), hints.to_vec()))
    }

    fn show(&mut self, meter: &mut Meter, stop: &Stop) -> io::Result<()> {
        let sampled = meter.read();
        match self {
            Self::Plain(plain) => plain.show(meter, sampled),
            Self::Live(live) => {
                if live.key()? == Some(Key::Stop) {
                    stop.ask();
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
    fn a_duration_of_nothing_is_without_end() {
        let duration = |text: &str| parse(&[&format!("--duration={text}")]).map(|options| options.duration);
        assert_eq!([duration("0"), duration("0s")], [Ok(None), Ok(None)]);
        assert_eq!(duration("90s"), Ok(Some(Duration::from_secs(90))));
        for text in ["10ms", "25h", "soon", "-3s"] {
            assert!(duration(text).unwrap_err().contains("--duration"), "{text}");
        }
    }

    #[test]
    fn the_demo_is_for_this_machine_only_and_within_its_limits() {
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
