use std::sync::atomic::{AtomicUsize, Ordering};

use prometheus::Registry;
use tokio::time::advance;

use super::*;
use crate::{
    cache::{ProcessBudgets, RingLimits},
    fanout::{Fresh, Gate, GateLimits, Hub, HubOptions, StreamEnd},
    telemetry::metrics::Metrics,
};
use kubefan_common::{
    proto::v1alpha1::{ResolvedResource, ResourceStatus},
    sync::watch,
};
use kubefan_model::{GroupVersionResource, ObjectKey, Scope, fields::FieldTable, object::ObjectParser};

/// A catalog with one cache, which is not synced, and a count of the searches for it.
struct OneCache {
    served: Served,
    searches: AtomicUsize,
    changes: watch::Sender<u64>,
}

impl OneCache {
    fn new() -> Arc<Self> {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let fields = Arc::new(FieldTable::new(&gvr, true, &[]));
        let parser = Arc::new(ObjectParser::new(&fields).of("Pod", "v1"));
        let all = Arc::new(Metrics::new(Registry::new()).unwrap());
        let gate = GateLimits { snapshots_max: 1, snapshot_queue_timeout: Duration::ZERO };
        let options = HubOptions {
            limits: RingLimits {
                ring_bytes_max: None,
                ring_events_max: 1,
                ring_age_max: Duration::ZERO,
                residue_bytes_max: None,
            },
            coalesce_max: Duration::ZERO,
            gate: Gate::new(gate, all.gate()),
            budgets: ProcessBudgets::default(),
            cluster: Arc::new(|| None),
        };
        let metrics = all.cache(&gvr, &Scope::Cluster, Media::Json, &StreamEnd::ALL);
        let hub = Hub::new(ResolvedResource::default(), parser.clone(), options, metrics);
        let list_kind = "PodList".into();
        let served = Served { gvr, namespaced: true, scope: Scope::Cluster, fields, list_kind, parser, hub };
        Arc::new(Self { served, searches: AtomicUsize::new(0), changes: watch::Sender::new(0) })
    }
}

fn unavailable<T>() -> Result<T, Refusal> {
    Err(Refusal::Unavailable("a test".to_owned()))
}

impl Catalog for OneCache {
    async fn find(&self, _: &str, _: &str, _: &str, _: &str, _: Media) -> Result<Served, Refusal> {
        self.searches.fetch_add(1, Ordering::Relaxed);
        Ok(self.served.clone())
    }

    async fn full_name(&self, _: &str, _: &str, _: &str) -> Option<GroupVersionResource> {
        None
    }

    async fn backfill(&self, _: &Served, _: ResourceVersion, _: bool) -> Result<Arc<Backfill>, Refusal> {
        unavailable()
    }

    async fn prove(&self, _: &Served, _: Option<&Selection>, _: Patience) -> Result<Fresh, Refusal> {
        unavailable()
    }

    async fn advance(&self, _: &Served, _: Patience) -> Result<(), Refusal> {
        unavailable()
    }

    async fn cluster_version(&self, _: &Served, _: Instant) -> Result<ResourceVersion, Refusal> {
        unavailable()
    }

    fn exists(&self, _: &GroupVersionResource, _: &ObjectKey, _: &str) -> Option<bool> {
        None
    }

    fn holds(&self, _: &GroupVersionResource, _: Media) -> bool {
        true
    }

    fn lacks_room(&self, _: &GroupVersionResource) -> bool {
        false
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn list(&self) -> Vec<(Media, ResourceStatus)> {
        Vec::new()
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_its_cache_does_not_search_again_when_others_change() {
    let catalog = OneCache::new();
    let selectors = SelectorLimits { terms_max: 1, values_max: 1 };
    let access = Arc::new(AccessControl::always_allow());
    let reader =
        Arc::new(Reader::new(catalog.clone(), access, CancellationToken::new(), (1.into(), 1.into()), selectors));
    let target = v1alpha1::Target { resource: "pods".to_owned(), ..v1alpha1::Target::default() };
    let presented = Presented::new(&http::HeaderMap::new(), false, false, Holder::new(1, None));
    let read = reader.authorize(&presented, Read::collection(ReadVerb::List, target), &Notes::default()).await.unwrap();
    let waiting = tokio::spawn(async move { reader.select_synced(&read, Media::Json).await.is_ok() });
    for _ in 0..100 {
        catalog.changes.send_modify(|changes| *changes += 1);
        advance(Duration::from_millis(1)).await;
        tokio::task::yield_now().await;
    }
    assert!(!waiting.is_finished());
    assert_eq!(catalog.searches.load(Ordering::Relaxed), 1, "changes of other caches do not concern it");
    catalog.served.hub.close(Phase::NotFound, StreamEnd::NotFound("gone".to_owned()));
    assert!(waiting.await.unwrap());
    assert_eq!(catalog.searches.load(Ordering::Relaxed), 2);
}
