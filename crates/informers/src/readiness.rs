//! Readiness and health: whether each resource is served.

use std::collections::HashMap;

use kubefan_cache::Phase;
use kubefan_fanout::{HubStatus, Served};
use kubefan_model::{Media, Scope};

use super::registry::{Registry, cache_title};

/// Whether all resources are ready; and for each resource, whether it is ready, with a line of
/// text.
pub type Readiness = (bool, Vec<(bool, String)>);

impl Registry {
    /// Whether every configured resource can be served or does not exist, with a line for each
    /// configured cache, each resource without one, and each right that kubefan lacks. Caches that
    /// readers started do not count, because no reader is refused without them.
    pub fn readiness(&self) -> Readiness {
        let mut lines = Vec::new();
        for cache in self.caches.iter() {
            let HubStatus { phase, message, age, .. } = cache.served.hub.status();
            let missing_right = cache.missing_right.get();
            if cache.on_demand() && phase != Phase::Forbidden && missing_right.is_none() {
                continue;
            }
            let proven = match age {
                Some(age) => format!("; proven {}s ago", age.as_secs()),
                None if phase.serves() => "; not proven yet".to_owned(),
                None => String::new(),
            };
            let missing_right = missing_right.map(|right| format!("; {right}")).unwrap_or_default();
            let Served { scope, parser, .. } = &cache.served;
            let title = cache_title(&cache.name, scope, parser.media());
            let line = line(&title, phase, &message) + &proven + &missing_right;
            // A stale cache is ready within `staleness_max`: an outage of upstream affects all
            // replicas alike, so removing this one helps no client.
            let refused = self.staleness_max.borrow().is_some_and(|max| age.is_none_or(|age| age > max));
            let is_ready = if phase.serves() { !refused } else { self.is_added(&cache.name) };
            lines.push((cache.on_demand() || is_ready, line));
        }
        for uncached in self.uncached.iter() {
            // Requests for a resource that does not exist are answered with NOT_FOUND, and requests
            // for one that cannot be cached are forwarded.
            let is_ready = is_unwanted(uncached.phase) || self.is_added(uncached.key());
            lines.push((is_ready, line(uncached.key(), uncached.phase, &uncached.message)));
        }
        lines.extend(self.context.upstream.identity().map(|identity| (true, format!("identity {identity}"))));
        lines.extend(self.context.source.fallback().map(|fallback| (true, fallback.status())));
        lines.sort_by(|(_, a), (_, b)| a.cmp(b));
        (lines.iter().all(|(ok, _)| *ok), lines)
    }

    /// Whether a resource was configured while kubefan runs. All replicas read the same file. If
    /// they were unready until it is synced, none would be left, and forever if kubefan may not
    /// read it.
    fn is_added(&self, name: &str) -> bool {
        self.added.contains_key(name)
    }

    /// Returns the number of caches that are wanted and have no state to serve. A configured
    /// resource that the apiserver does not have, or that cannot be cached, is not wanted.
    pub(super) fn unsynced(&self) -> usize {
        let caches = self.caches.iter().filter(|cache| !cache.served.hub.phase().borrow().serves()).count();
        caches + self.uncached.iter().filter(|uncached| !is_unwanted(uncached.phase)).count()
    }

    /// Whether each resource is served, by its configured and its full name. A name alone covers
    /// all scopes of the resource; a name with a namespace covers one.
    pub fn health(&self) -> HashMap<String, bool> {
        let mut health = HashMap::new();
        let mut note = |name: &str, scope: &Scope, serves: bool| {
            for name in [name.to_owned(), cache_title(name, scope, Media::Json)] {
                *health.entry(name).or_insert(true) &= serves;
            }
        };
        for cache in self.caches.iter().filter(|cache| cache.key().media == Media::Json || !cache.on_demand()) {
            let Served { gvr, scope, hub, .. } = &cache.served;
            let full_name = gvr.to_string();
            let serves = hub.phase().borrow().serves();
            note(&full_name, scope, serves);
            if cache.name != full_name {
                note(&cache.name, scope, serves);
            }
        }
        // Before discovery, it is unknown whether the resource has namespaces.
        for uncached in self.uncached.iter() {
            for namespace in &self.options.namespaces {
                note(uncached.key(), &Scope::Namespace(namespace.clone()), false);
            }
            note(uncached.key(), &Scope::Cluster, false);
        }
        health
    }
}

fn is_unwanted(phase: Phase) -> bool {
    matches!(phase, Phase::NotFound | Phase::NotCached)
}

fn line(name: &str, phase: Phase, message: &str) -> String {
    let colon = if message.is_empty() { "" } else { ": " };
    format!("{name} {}{colon}{message}", phase.as_str())
}
