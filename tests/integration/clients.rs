//! Unmodified clients: the same program against the apiserver and against kubefan in front of it, over TLS and with a token, because that is
//! how clients send credentials. What they see must be equal.
//!
//! What may differ is masked, and only that: the ages of objects, which pass while the one waits for the other, and the names of the two
//! namespaces where each side writes for itself.

use std::path::PathBuf;

use crate::harness::{apiserver::ApiServer, kubefan::Kubefan};

pub(crate) mod client_go;
pub(crate) mod kube_rs;
pub(crate) mod kubectl;
pub(crate) mod python;

/// An apiserver, and kubefan in front of it.
struct Both {
    api: ApiServer,
    kubefan: Kubefan,
    servers: [Server; 2],
}

/// What a client is told of a server.
#[derive(Clone)]
struct Server {
    name: &'static str,
    kubeconfig: PathBuf,
}

impl Both {
    /// Starts kubefan in front of `api`, with such arguments besides.
    async fn start(api: ApiServer, args: &[&str]) -> Both {
        Both::start_at(api, "127.0.0.1:0", args).await
    }

    /// The same at an address.
    async fn start_at(api: ApiServer, address: &str, args: &[&str]) -> Both {
        let (certificate, key) = api.server_certificate();
        let paths = [certificate, key].map(|path| path.to_str().expect("the path is text").to_owned());
        let tls = ["--tls-cert-file", &paths[0], "--tls-private-key-file", &paths[1]];
        let kubefan = Kubefan::spawn_at(&api.kubeconfig(), address, &[&tls, args].concat()).await;
        kubefan.ready().await;
        let through = api.kubeconfig_to(&format!("https://{}", kubefan.grpc_addr));
        let servers =
            [Server { name: "direct", kubeconfig: api.kubeconfig() }, Server { name: "kubefan", kubeconfig: through }];
        Both { api, kubefan, servers }
    }

    /// What kubefan counts of its caches: the sum of a metric, and its lines.
    async fn metric(&self, name: &str) -> (f64, String) {
        let (_, metrics) = self.kubefan.admin("/metrics").await.expect("metrics are served");
        let ours: Vec<_> =
            metrics.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'))).collect();
        let sum = ours.iter().filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
        (sum, ours.join("\n"))
    }

    /// Fails unless lists were answered from the cache.
    async fn assert_lists_were_cached(&self) {
        let (objects, lines) = self.metric("kubefan_snapshot_objects_sent_total").await;
        assert!(objects > 0.0, "nothing was listed from the cache: {lines}");
    }
}

/// Lets lists that must be consistent be answered from the cache however small they are; else upstream would be asked, which is sooner.
const SMALL_LISTS: &str = "--consistent-list-bytes-min=0";

/// Two that must be equal, told apart by what they are.
#[track_caller]
fn assert_equal(what: &str, direct: &[String], kubefan: &[String]) {
    let differs = direct.iter().zip(kubefan).position(|(direct, kubefan)| direct != kubefan);
    let at = differs.unwrap_or(direct.len().min(kubefan.len()));
    if direct.len() != kubefan.len() || differs.is_some() {
        let of = |lines: &[String]| lines.get(at).cloned().unwrap_or("(nothing)".to_owned());
        panic!("{what}: line {at} is\n{}\nfrom the apiserver, and\n{}\nthrough kubefan", of(direct), of(kubefan));
    }
}
