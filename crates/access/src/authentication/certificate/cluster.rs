//! Reads the CAs of the cluster's client certificates, as extension apiservers do
//! (`DelegatingAuthenticationOptions` in `apiserver/pkg/server/options`, with
//! `--authentication-tolerate-lookup-failure`).
//!
//! The hazard is a lookup that fails: the CAs in use stay in use, and the log says once why.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kubefan_upstream::{Upstream, UpstreamError, client::Verb};
use serde::Deserialize;
use tokio::time::sleep;
use tracing::{info, warn};

use super::trusted_cas::TrustedCas;

const PATH: &str = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
const KEY: &str = "client-ca-file";
/// The time between two lookups.
const INTERVAL: Duration = Duration::from_secs(60);
/// The time between two lookups until one has succeeded.
const FIRST_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Deserialize)]
struct ConfigMap {
    #[serde(default)]
    data: Option<BTreeMap<String, String>>,
}

/// The reason why a lookup brought no CAs.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Failure {
    /// There are none: kubefan may not read them, or the cluster has none.
    NoCas(&'static str),
    /// The ConfigMap was read, but its CAs cannot be used.
    Unusable(String),
    /// Nothing was read.
    NoAnswer,
}

/// Looks the CAs up now and from then on. Never ends.
pub async fn follow(upstream: Upstream, cas: Arc<TrustedCas>) {
    let mut last = None;
    let mut is_read = false;
    loop {
        let failure = look_up(&upstream, &cas).await.err();
        is_read |= failure != Some(Failure::NoAnswer);
        if last != failure {
            match &failure {
                Some(Failure::NoCas(why)) => {
                    warn!("{why}; client certificates are not accepted, unless CAs were read before");
                }
                Some(Failure::Unusable(why)) => {
                    warn!(error = why, "{KEY} of {PATH} cannot be used; the CAs of clients stay as they are");
                }
                Some(Failure::NoAnswer) | None => {}
            }
        }
        // An outage between two equal failures is no news.
        last = if failure == Some(Failure::NoAnswer) { last } else { failure };
        sleep(if is_read { INTERVAL } else { FIRST_INTERVAL }).await;
    }
}

async fn look_up(upstream: &Upstream, cas: &TrustedCas) -> Result<(), Failure> {
    const DENIED: &str = "kubefan may not read the ConfigMap kube-system/extension-apiserver-authentication: bind the Role \
        extension-apiserver-authentication-reader of kube-system to its account, give --client-ca-file, or give \
        tuning.authenticationSkipLookup";
    const MISSING: &str = "the cluster names no CA of client certificates (client-ca-file of the ConfigMap \
        kube-system/extension-apiserver-authentication)";
    let read = upstream.get_json::<ConfigMap>(Verb::Get, PATH).await;
    let pem = match read {
        Ok(map) => map.data.unwrap_or_default().remove(KEY).filter(|pem| !pem.is_empty()).ok_or(MISSING),
        Err(UpstreamError::Forbidden { .. }) => Err(DENIED),
        Err(UpstreamError::NotFound { .. }) => Err(MISSING),
        Err(_) => return Err(Failure::NoAnswer),
    };
    let pem = pem.map_err(|why| {
        cas.trust_none();
        Failure::NoCas(why)
    })?;
    match cas.replace(pem.as_bytes()) {
        Ok(true) => info!("the CAs of clients were read from the cluster"),
        Ok(false) => {}
        Err(error) => {
            cas.trust_none();
            return Err(Failure::Unusable(error.to_string()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
