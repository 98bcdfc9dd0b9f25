//! Reads the signing keys from the discovery of the apiserver's issuer
//! (`/.well-known/openid-configuration`, `/openid/v1/jwks`). Every service account may read it
//! (ClusterRole `system:service-account-issuer-discovery`).
//!
//! The hazard is a flood of tokens with made-up keys that makes kubefan ask again and again. So the
//! keys are read at most once a minute, and no request waits for them.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kubefan_upstream::{Upstream, UpstreamError, client::Verb};
use serde::Deserialize;
use tokio::time::Instant;
use tracing::{info, warn};

use super::signing_keys::SigningKeys;

/// The shortest time between two reads.
const READ_INTERVAL: Duration = Duration::from_secs(60);
/// Keys that were read longer ago do not count: one may have been withdrawn since.
const KEYS_AGE_MAX: Duration = Duration::from_secs(10 * 60);

/// The keys, read when they are needed.
pub(super) struct KeySource {
    shared: Arc<Shared>,
}

struct Shared {
    upstream: Upstream,
    state: Mutex<CachedKeys>,
}

#[derive(Default)]
struct CachedKeys {
    keys: Option<(Arc<SigningKeys>, Instant)>,
    asked_at: Option<Instant>,
}

#[derive(Deserialize)]
struct Configuration {
    issuer: String,
}

impl KeySource {
    /// Reads over `upstream`.
    pub(super) fn new(upstream: Upstream) -> Self {
        Self { shared: Arc::new(Shared { upstream, state: Mutex::default() }) }
    }

    /// The keys, if they count and the one with this ID is among them. Otherwise they are read
    /// again, for later tokens.
    pub(super) fn with(&self, key_id: &str) -> Option<Arc<SigningKeys>> {
        let now = Instant::now();
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        let counting = state.keys.as_ref().filter(|(_, read_at)| now.duration_since(*read_at) < KEYS_AGE_MAX);
        let found = counting.map(|(keys, _)| keys.clone()).filter(|keys| keys.has(key_id));
        // In time before they cease to count.
        let is_aging = counting.is_none_or(|(_, read_at)| now.duration_since(*read_at) >= KEYS_AGE_MAX / 2);
        let may_ask = state.asked_at.is_none_or(|at| now.duration_since(at) >= READ_INTERVAL);
        if (found.is_none() || is_aging) && may_ask {
            state.asked_at = Some(now);
            tokio::spawn(self.shared.clone().read());
        }
        found
    }
}

impl Shared {
    async fn read(self: Arc<Self>) {
        // Before the request: the keys are not older.
        let read_at = Instant::now();
        match self.keys().await {
            Ok(keys) => {
                let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                if state.keys.is_none() {
                    info!(issuer = keys.issuer(), keys = keys.len(), "tokens of service accounts are checked here");
                }
                state.keys = Some((Arc::new(keys), read_at));
            }
            Err(error) => warn!(
                %error,
                "the keys of service account tokens cannot be read, so all tokens are reviewed (tuning.serviceAccountJwks)"
            ),
        }
    }

    async fn keys(&self) -> Result<SigningKeys, UpstreamError> {
        let Configuration { issuer } = self.upstream.get_json(Verb::Get, "/.well-known/openid-configuration").await?;
        // Not at the address that the configuration names: that is for parties outside of the
        // cluster.
        let answer = self.upstream.get_accept(Verb::Get, "/openid/v1/jwks", "application/jwk-set+json").await?;
        SigningKeys::of_json(issuer, answer.body())
    }
}
