//! `access`: the cost of knowing callers and their rights. A server that does not ask, one that has
//! every verdict in its cache, and one that asks upstream for each request answer the same requests
//! in turns, so that a disturbance affects all of them.
//!
//! The simulated apiserver answers reviews at once. Their cost for the apiserver, and the way to
//! it, are not measured.

use std::time::Duration;

use tokio::time::Instant;

use super::{Sample, Variant};
use crate::{
    BenchError,
    figures::{Figure, Figures, spread},
    process::Meter,
    rest::RestClient,
    server_process::{Run, Server},
    source::{Source, pods_path},
};

/// Rounds. Every server answers in each of them.
const ROUNDS: usize = 21;
/// Requests of one round to one server.
const REQUESTS: usize = 200;
/// Callers, each with a token. They take turns.
const CALLERS: usize = 500;

/// Ways in which a server knows its callers, and its flags.
const MODES: [(&str, &[&str]); 3] = [
    ("callers not known", &["--access=local"]),
    (
        "verdicts cached",
        &["--access=authorized", "--anonymous-auth", "tuning.authenticationTokenWebhookCacheTtl=1h", UNLIMITED],
    ),
    (
        "every request reviewed",
        &[
            "--access=authorized",
            "--anonymous-auth",
            "tuning.authenticationTokenWebhookCacheTtl=0s",
            "tuning.authorizationWebhookCacheAuthorizedTtl=0s",
            UNLIMITED,
        ],
    ),
];
const UNLIMITED: &str = "limits.accessReviewsPerSecond=1000000";

/// The request to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    /// The pods of a node.
    List,
    /// A watch of the pods of a node, which ends when it has begun.
    Watch,
}

/// A server in its mode, and its figures of each round.
struct Contender {
    server: Server,
    meter: Meter,
    client: RestClient,
    /// CPU time per request in milliseconds, by round.
    cpu: Vec<f64>,
    took: Vec<Duration>,
}

pub(super) async fn measure(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let mut contenders = Vec::new();
    for (_, flags) in MODES {
        let flags: Vec<String> = flags.iter().map(ToString::to_string).collect();
        let server = run.start_server_with(source, &flags).await?;
        let client = RestClient::connect(server.http_endpoint()).await?;
        let meter = server.new_meter();
        contenders.push(Contender { server, meter, client, cpu: Vec::new(), took: Vec::new() });
    }
    let mut samples = Vec::new();
    for (request, names) in [
        (Request::List, ["list, callers not known", "list, verdicts cached", "list, every request reviewed"]),
        (Request::Watch, ["watch, callers not known", "watch, verdicts cached", "watch, every request reviewed"]),
    ] {
        // The first requests of each caller fill the caches.
        for contender in &mut contenders {
            contender.round(request, source, run.options.nodes, 0..CALLERS).await?;
            contender.cpu.clear();
            contender.took.clear();
        }
        for round in 0..ROUNDS {
            for contender in &mut contenders {
                let numbers = round * REQUESTS..(round + 1) * REQUESTS;
                contender.round(request, source, run.options.nodes, numbers).await?;
            }
        }
        let baseline = contenders[0].cpu.clone();
        for (name, contender) in names.into_iter().zip(&mut contenders) {
            let figures = contender.figures(&baseline);
            samples.push((Variant { name, subscribers: 1, batch: None }, figures));
        }
    }
    Ok(samples)
}

impl Contender {
    async fn round(
        &mut self,
        request: Request,
        source: &Source,
        nodes: usize,
        numbers: std::ops::Range<usize>,
    ) -> Result<(), BenchError> {
        let before = self.meter.cpu_nanos()?;
        let count = numbers.len();
        let version = self.server.version(source);
        for number in numbers {
            let caller = self.client.with_token(&format!("caller-{}", number % CALLERS));
            let path =
                format!("{}?fieldSelector=spec.nodeName%3Dnode-{}", pods_path(source.namespace()), number % nodes);
            let start = Instant::now();
            match request {
                Request::List => {
                    caller.download(&format!("{path}&resourceVersion=0")).await?;
                }
                Request::Watch => caller.open(&format!("{path}&watch=1&resourceVersion={version}")).await?,
            }
            self.took.push(start.elapsed());
        }
        self.cpu.push((self.meter.cpu_nanos()? - before) as f64 / 1e6 / count as f64);
        Ok(())
    }

    /// The figures of all rounds, and empties them.
    fn figures(&mut self, baseline: &[f64]) -> Figures {
        let mut figures = Figures::default();
        let ratios = self.cpu.iter().zip(baseline).map(|(own, other)| own / other);
        if let (Some(cpu), Some(ratio)) = (spread(self.cpu.iter().copied()), spread(ratios)) {
            figures.set(Figure::CpuPerClient, cpu.median);
            figures.set(Figure::CpuRatio, ratio.median);
        }
        self.took.sort_unstable();
        let millis = |percent: usize| self.took[self.took.len() * percent / 100].as_secs_f64() * 1e3;
        figures.set(Figure::LatencyP50, millis(50));
        figures.set(Figure::LatencyP99, millis(99));
        self.cpu.clear();
        self.took.clear();
        figures
    }
}
