//! Runs unmodified clients against the apiserver and against kubefan in front of it. Both
//! connections use TLS and a token, as clients do when they send credentials. Both runs must see
//! the same.
//!
//! Only two things are masked: ages of objects, because time passes between the two runs, and the
//! names of the namespaces that each run writes to.

use std::path::PathBuf;

use crate::harness::{
    apiserver::ApiServer,
    kubefan::{Kubefan, value_of},
};

pub(crate) mod client_go;
pub(crate) mod kube_rs;
pub(crate) mod kubectl;
pub(crate) mod python;

/// An apiserver and a kubefan in front of it.
pub(crate) struct Both {
    pub(crate) api: ApiServer,
    pub(crate) kubefan: Kubefan,
    pub(crate) servers: [Server; 2],
}

/// A server, as a client is configured for it.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) name: &'static str,
    pub(crate) kubeconfig: PathBuf,
}

impl Both {
    /// Starts kubefan in front of `api` with additional arguments.
    pub(crate) async fn start(api: ApiServer, args: &[&str]) -> Both {
        Both::start_at(api, "127.0.0.1:0", args).await
    }

    /// Like [`Self::start`], with kubefan at a given address.
    pub(crate) async fn start_at(api: ApiServer, address: &str, args: &[&str]) -> Both {
        let kubefan = kubefan_at(&api, address, args).await;
        let through = api.kubeconfig_to(&format!("https://{}", kubefan.grpc_addr));
        let servers =
            [Server { name: "direct", kubeconfig: api.kubeconfig() }, Server { name: "kubefan", kubeconfig: through }];
        Both { api, kubefan, servers }
    }

    /// The sum of one of kubefan's metrics over its labels, and its lines.
    pub(crate) async fn metric(&self, name: &str) -> (f64, String) {
        let ours = self.kubefan.metric_lines(name).await.expect("metrics are served");
        (ours.iter().map(|line| value_of(line)).sum(), ours.join("\n"))
    }

    /// Fails unless kubefan answered lists from the cache.
    async fn assert_lists_were_cached(&self) {
        let (objects, lines) = self.metric("kubefan_snapshot_objects_sent_total").await;
        assert!(objects > 0.0, "no list was answered from the cache: {lines}");
    }
}

/// Starts kubefan in front of `api`, with the certificate of a server.
pub(crate) async fn kubefan_at(api: &ApiServer, address: &str, args: &[&str]) -> Kubefan {
    let (certificate, key) = api.server_certificate();
    let paths = [certificate, key].map(|path| path.to_str().expect("the path is text").to_owned());
    let tls = ["--tls-cert-file", &paths[0], "--tls-private-key-file", &paths[1]];
    let kubefan = Kubefan::spawn_at(&api.kubeconfig(), address, &[&tls, args].concat()).await;
    kubefan.ready().await;
    kubefan
}

/// Answers consistent lists of any size from the cache. By default, small ones are forwarded
/// upstream, which is faster.
const SMALL_LISTS: &str = "tuning.consistentListBytesMin=0";

/// Compares two sequences of lines and shows the first difference.
#[track_caller]
fn assert_equal(what: &str, direct: &[String], kubefan: &[String]) {
    let differs = direct.iter().zip(kubefan).position(|(direct, kubefan)| direct != kubefan);
    let at = differs.unwrap_or(direct.len().min(kubefan.len()));
    if direct.len() != kubefan.len() || differs.is_some() {
        let of = |lines: &[String]| lines.get(at).cloned().unwrap_or("(nothing)".to_owned());
        panic!("{what}: line {at} is\n{}\nfrom the apiserver, and\n{}\nthrough kubefan", of(direct), of(kubefan));
    }
}
