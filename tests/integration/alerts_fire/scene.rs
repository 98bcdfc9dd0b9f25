//! A scene: kubefans in trouble as one job of Prometheus, and the alerts that it should have.

use std::{
    future::Future,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use kubefan_sim::apiserver::{Fault, FaultRule, SimApiserver, SimOptions, Verb};
use serde_json::json;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep},
};

use super::AT_MOST;
use crate::harness::{
    kubefan::Kubefan,
    link::Link,
    prometheus::{Prometheus, Target},
    rig::{pod, pods},
    simulated::Simulated,
    wait,
};

/// An address without a listener.
const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1);
/// The instances of each scene.
const INSTANCES: [&str; 2] = ["a", "b"];

/// An alert that fired and resolved.
#[derive(Clone, Debug)]
pub(super) struct Proved {
    /// Name of the alert, with a label where two alerts have one name.
    pub(super) alert: String,
    pub(super) cause: &'static str,
    pub(super) fired: Duration,
    pub(super) remedy: &'static str,
    pub(super) resolved: Duration,
}

/// Prometheus, and the links through which it scrapes.
pub(super) struct Stage {
    prometheus: Arc<Prometheus>,
    links: Vec<(&'static str, &'static str, Arc<Link>)>,
    proved: Arc<Mutex<Vec<Proved>>>,
}

impl Stage {
    /// Starts Prometheus with two targets for each job. They do not answer before a scene leads
    /// them to a kubefan.
    pub(super) async fn start(rules: &str, jobs: &[&'static str]) -> Stage {
        let mut links = Vec::new();
        for job in jobs {
            for instance in INSTANCES {
                links.push((*job, instance, Arc::new(Link::to(NOWHERE).await)));
            }
        }
        let target =
            |(job, instance, link): &(&'static str, &'static str, Arc<Link>)| Target { job, instance, addr: link.addr };
        let targets: Vec<_> = links.iter().map(target).collect();
        let prometheus = Arc::new(Prometheus::start(rules, &targets).await);
        Stage { prometheus, links, proved: Arc::default() }
    }

    pub(super) fn scene(&self, job: &'static str) -> Scene {
        let links = self.links.iter().filter(|(of, ..)| *of == job).map(|(_, _, link)| link.clone()).collect();
        Scene { job, links, prometheus: self.prometheus.clone(), proved: self.proved.clone() }
    }

    pub(super) fn end(self) -> (Prometheus, Vec<Proved>) {
        let prometheus = Arc::into_inner(self.prometheus).expect("all scenes have ended");
        (prometheus, self.proved.lock().unwrap().clone())
    }
}

/// A part of the test, with a job of its own.
pub(super) struct Scene {
    job: &'static str,
    links: Vec<Arc<Link>>,
    prometheus: Arc<Prometheus>,
    proved: Arc<Mutex<Vec<Proved>>>,
}

/// Alerts that fire.
pub(super) struct Firing {
    scene: Scene,
    cause: &'static str,
    alerts: Vec<(String, Duration)>,
}

impl Scene {
    /// From now on Prometheus scrapes this kubefan as the first instance.
    pub(super) fn scrape(&self, kubefan: &Kubefan) {
        self.scrape_as(0, kubefan);
    }

    /// Scrapes kubefan as another instance.
    pub(super) fn scrape_as(&self, instance: usize, kubefan: &Kubefan) {
        self.links[instance].lead_to(kubefan.admin_addr);
    }

    /// Waits until an expression has such a value. `JOB` stands for the selector of this job.
    pub(super) async fn sees(&self, expression: &str, is: impl Fn(f64) -> bool) {
        let expression = expression.replace("JOB", &format!("job=\"{}\"", self.job));
        let value = || async { self.prometheus.value(&expression).await.filter(|value| is(*value)) };
        wait::until(&expression, AT_MOST, value).await;
    }

    /// Whether an alert fires for this job. After its name it may have a label, as in
    /// `Alert{review=token}`.
    async fn fires(&self, alert: &str) -> bool {
        let (name, label) = alert.split_once('{').unwrap_or((alert, ""));
        let label = label.trim_end_matches('}').split_once('=');
        let is_ours = |labels: &serde_json::Value| {
            labels["alertname"] == name
                && (labels["job"] == self.job || (labels["job"].is_null() && self.job == "kubefan"))
                && label.is_none_or(|(name, value)| labels[name] == *value)
        };
        self.prometheus.firing().await.iter().any(is_ours)
    }

    /// Waits until all these alerts have fired for this job.
    pub(super) async fn fired(self, cause: &'static str, alerts: &[&str]) -> Firing {
        let began = Instant::now();
        let mut fired = Vec::<(String, Duration)>::new();
        while fired.len() < alerts.len() {
            for alert in alerts {
                if !fired.iter().any(|(known, _)| known == alert) && self.fires(alert).await {
                    println!("{}: {alert} fires after {:?}", self.job, began.elapsed());
                    fired.push(((*alert).to_owned(), began.elapsed()));
                }
            }
            let names: Vec<_> = fired.iter().map(|(name, _)| name).collect();
            assert!(began.elapsed() < AT_MOST, "{}: of {alerts:?} only {names:?} fired", self.job);
            sleep(Duration::from_millis(250)).await;
        }
        Firing { scene: self, cause, alerts: fired }
    }
}

impl Firing {
    /// The scene, to look at or to change the scraped instances.
    pub(super) fn scene(&self) -> &Scene {
        &self.scene
    }

    /// Waits until the alerts fire no more, after the steps of the runbook.
    pub(super) async fn resolved(self, remedy: &'static str) -> Scene {
        let Firing { scene, cause, mut alerts } = self;
        let began = Instant::now();
        while !alerts.is_empty() {
            let mut still = Vec::new();
            for (alert, fired) in alerts {
                if scene.fires(&alert).await {
                    still.push((alert, fired));
                    continue;
                }
                println!("{}: {alert} resolved after {:?}", scene.job, began.elapsed());
                scene.proved.lock().unwrap().push(Proved { alert, cause, fired, remedy, resolved: began.elapsed() });
            }
            alerts = still;
            assert!(began.elapsed() < AT_MOST, "{}: {alerts:?} still fire", scene.job);
            sleep(Duration::from_millis(250)).await;
        }
        scene
    }
}

/// A task that repeats until the value is dropped.
pub(super) struct Ongoing(JoinHandle<()>);

impl Drop for Ongoing {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Repeats something at this interval until the value is dropped.
pub(super) fn every<F: Future<Output = ()> + Send + 'static>(
    interval: Duration,
    mut act: impl FnMut() -> F + Send + 'static,
) -> Ongoing {
    Ongoing(tokio::spawn(async move {
        loop {
            act().await;
            sleep(interval).await;
        }
    }))
}

/// A simulated apiserver with three pods, whose version moves and which sends bookmarks each
/// second, so that a cache is stale only when something is wrong.
pub(super) async fn lively() -> (Simulated, Ongoing) {
    let simulated =
        Simulated::with(SimOptions { bookmark_interval: Duration::from_secs(1), ..SimOptions::default() }).await;
    for name in ["a", "b", "c"] {
        simulated.create(name);
    }
    let sim = simulated.sim.clone();
    let mut round = 0;
    let writing = every(Duration::from_millis(500), move || {
        round += 1;
        sim.update(&pods(), pod("a", &format!("s{}", round % 5))).expect("the pod exists");
        std::future::ready(())
    });
    (simulated, writing)
}

impl Scene {
    /// Starts a kubefan of pods in front of a lively apiserver, and has Prometheus scrape it.
    pub(super) async fn begin(&self, args: &[&str]) -> (Simulated, Kubefan, Ongoing) {
        let (simulated, writing) = lively().await;
        let kubefan = simulated.kubefan(&[&["--resource=pods"], args].concat()).await;
        self.scrape(&kubefan);
        (simulated, kubefan, writing)
    }
}

/// Answers all requests with this fault until faults are cleared, or those of one verb.
pub(super) fn fails(simulated: &Simulated, fault: Fault, verb: Option<Verb>) {
    simulated.sim.set_fault(FaultRule { fault, verb, resource: None, requests: usize::MAX });
}

/// Sends a GET again and again. Answers are read and forgotten.
pub(super) fn asks(interval: Duration, client: reqwest::Client, url: String) -> Ongoing {
    every(interval, move || {
        let request = client.get(&url).timeout(Duration::from_secs(5));
        async move {
            if let Ok(answer) = request.send().await {
                let _ = answer.bytes().await;
            }
        }
    })
}

/// Four times a second, which is above every rate that alerts ask for.
pub(super) const OFTEN: Duration = Duration::from_millis(250);

/// A pod of this many bytes.
pub(super) fn large(name: &str, bytes: usize) -> serde_json::Value {
    filled(name, "x".repeat(bytes))
}

fn filled(name: &str, filling: String) -> serde_json::Value {
    let mut pod = pod(name, "large");
    pod["metadata"]["annotations"] = json!({ "filling": filling });
    pod
}

/// Creates a pod of this many bytes, and overwrites it again and again. Its filling changes each
/// time, because an update that changes nothing makes no event. Returns the number of updates too.
pub(super) fn rewritten(sim: &SimApiserver, bytes: usize, interval: Duration) -> (Ongoing, watch::Receiver<usize>) {
    let pod = move |round: usize| filled("rewritten", format!("{round:0bytes$}"));
    sim.create(&pods(), pod(0)).expect("the pod is new");
    let sim = sim.clone();
    let (counter, updates) = watch::channel(0);
    let ongoing = every(interval, move || {
        let round = *counter.borrow() + 1;
        sim.update(&pods(), pod(round)).expect("the pod exists");
        counter.send_replace(round);
        std::future::ready(())
    });
    (ongoing, updates)
}
