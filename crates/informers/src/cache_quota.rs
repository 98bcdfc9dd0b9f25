//! Limits for caches that readers start, and the quota that enforces them for one cache.
//!
//! Without limits, any reader could fill the memory by naming resources.

use std::{sync::Arc, time::Duration};

use kubefan_common::api_json::ListJson;
use kubefan_fanout::Served;
use kubefan_model::{GroupVersionResource, Media};
use kubefan_upstream::client::{Verb, encode_query};
use serde::de::IgnoredAny;
use tokio_util::sync::CancellationToken;

use super::{
    shared_bytes::{Membership, ReadingTenants, SharedBytes},
    upstream_context::CacheContext,
};

/// Limits for resources that are cached on demand, in addition to the configured ones.
#[derive(Debug, Clone, Copy)]
pub struct OnDemandLimits {
    /// Resources cached at the same time.
    pub on_demand_resources_max: usize,
    /// Size of their caches.
    pub size: SizeLimits,
    /// A cache without readers is dropped after this time.
    pub on_demand_idle_timeout: Duration,
}

/// Limits for caches in an encoding other than JSON.
#[derive(Debug, Clone, Copy)]
pub struct EncodingLimits {
    /// Bytes of all objects of all resources together.
    pub bytes_max: usize,
    /// A cache without readers is dropped after this time.
    pub idle_timeout: Duration,
}

/// Size limits of caches that readers start.
#[derive(Debug, Clone, Copy)]
pub struct SizeLimits {
    /// Objects of one resource.
    pub on_demand_objects_max: usize,
    /// JSON bytes of all resources together.
    pub on_demand_bytes_max: usize,
}

/// The bytes that all caches of one encoding may share.
#[derive(Clone)]
pub(super) struct EncodingBudget {
    pub(super) media: Media,
    pub(super) bytes_max: usize,
    /// The caches that share it.
    pub(super) used: SharedBytes,
}

impl EncodingBudget {
    /// Returns the name of these bytes in messages.
    fn unit(&self) -> &'static str {
        match self.media {
            Media::Json => "bytes",
            Media::Protobuf => "bytes of protobuf",
            Media::Table => "bytes of tables",
        }
    }

    /// Returns the key of the configuration file that raises `bytes_max`.
    fn setting(&self) -> &'static str {
        match self.media {
            Media::Json => "limits.onDemandBytesMax",
            Media::Protobuf => "limits.protobufBytesMax",
            Media::Table => "limits.cacheTablesBytesMax",
        }
    }
}

/// The message that a cache exceeds its quota. It names the setting to raise.
pub(super) struct TooLarge(pub(super) String);

/// The limits of one cache that a reader starts.
pub(super) struct CacheLimits {
    /// Objects; `None` for no limit.
    pub(super) objects_max: Option<usize>,
    /// The bytes that it shares with others.
    pub(super) budget: EncodingBudget,
    /// Whether upstream is asked for the size before the list: see
    /// [`CacheQuota::check_size_upstream`].
    pub(super) checks_first: bool,
    /// Whether its resource is configured.
    pub(super) is_configured: bool,
}

/// The objects and bytes that one cache may hold. Dropping it returns the bytes to the budget.
pub(super) struct CacheQuota {
    limits: CacheLimits,
    membership: Membership,
}

impl CacheQuota {
    /// Creates the quota of a cache that these tenants read.
    pub(super) fn new(limits: CacheLimits, tenants: Arc<ReadingTenants>) -> Self {
        let membership = limits.budget.used.join(limits.is_configured, tenants);
        Self { limits, membership }
    }

    /// Returns a token that is cancelled when the cache has to end, because others need its bytes.
    pub(super) fn end_token(&self) -> CancellationToken {
        self.membership.end_token()
    }

    /// Returns the message for a cache that exceeds the bytes of all.
    pub(super) fn too_many_bytes(&self, gvr: &GroupVersionResource) -> String {
        let budget = &self.limits.budget;
        let EncodingBudget { media, bytes_max, .. } = budget;
        let unit = budget.unit();
        let setting = budget.setting();
        // The other encodings of a configured resource count as well.
        let or_name = if *media == Media::Json { ", or name it with --resource" } else { "" };
        format!("with {gvr} more than {bytes_max} {unit} would be cached on demand; raise {setting}{or_name}")
    }

    /// Records the current size of the cache, and fails if it exceeds a limit.
    pub(super) fn record(&self, gvr: &GroupVersionResource, objects: usize, bytes: usize) -> Result<(), TooLarge> {
        if let Some(objects_max) = self.limits.objects_max.filter(|most| objects > *most) {
            return Err(TooLarge(format!(
                "{gvr} has more than {objects_max} objects, the limit for resources that are cached on demand; \
                 raise limits.onDemandObjectsMax, or name it with --resource"
            )));
        }
        if !self.membership.record(bytes, self.limits.budget.bytes_max) {
            return Err(TooLarge(self.too_many_bytes(gvr)));
        }
        Ok(())
    }

    /// Lists one object and reads the number of remaining ones, so that a cache that is far too
    /// large is not listed again and again.
    ///
    /// Only a resource that was too large before is checked. For all others, the request would cost
    /// upstream a list for nothing, and [`record`](Self::record) stops the list at the limit.
    pub(super) async fn check_size_upstream(&self, context: &CacheContext, served: &Served) -> Result<(), TooLarge> {
        if !self.limits.checks_first {
            return Ok(());
        }
        let query = encode_query([("limit", "1"), ("fieldSelector", context.upstream_field_selector.as_str())]);
        // Another kubefan cannot report the number over gRPC, and sends the objects from its memory
        // anyway.
        let source = context.source.current();
        let Some(source) = source.http() else { return Ok(()) };
        // If this request fails, so does the list that follows, and the informer handles that.
        let Ok(body) = source.get(Verb::List, &(served.gvr.collection_path(&served.scope) + &query)).await else {
            return Ok(());
        };
        let Some(objects) = objects_in_all(&body) else { return Ok(()) };
        let CacheLimits { objects_max, ref budget, .. } = self.limits;
        let bytes_max = budget.bytes_max;
        let unit = budget.unit();
        let setting = budget.setting();
        // Other objects may be smaller than the first, so the estimate counts a quarter of its
        // size.
        let clearly_too_large = objects.saturating_mul(body.len()) / 4 > bytes_max;
        if objects_max.is_some_and(|most| objects > most) || clearly_too_large {
            let (most, remedy) = match objects_max {
                Some(most) => (
                    format!("{most} objects and "),
                    format!("limits.onDemandObjectsMax or {setting}, or name it with --resource"),
                ),
                None => (String::new(), setting.to_owned()),
            };
            return Err(TooLarge(format!(
                "{} has {objects} objects, the first of {} bytes; on demand at most {most}{bytes_max} {unit} are cached; \
                 raise {remedy}",
                served.gvr,
                body.len()
            )));
        }
        Ok(())
    }
}

/// Returns the number of objects of a list, from a first page with one of them. `None` if it is not
/// a page of a list.
fn objects_in_all(page: &[u8]) -> Option<usize> {
    let list: ListJson<IgnoredAny> = serde_json::from_slice(page).ok()?;
    // The apiserver does not count when a selector is set.
    let remaining = list.metadata?.remaining_item_count.and_then(|remaining| usize::try_from(remaining).ok());
    Some(remaining.unwrap_or(0).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message_of_a_full_budget(media: Media) -> String {
        let budget = EncodingBudget { media, bytes_max: 100, used: SharedBytes::default() };
        let limits = CacheLimits { objects_max: None, budget, checks_first: false, is_configured: false };
        let pods = GroupVersionResource::new("", "v1", "pods");
        let TooLarge(message) = CacheQuota::new(limits, Arc::default()).record(&pods, 1, 101).err().unwrap();
        message
    }

    #[test]
    fn the_message_of_a_full_budget_names_the_settings_that_help() {
        for (media, settings) in [
            (Media::Json, "raise limits.onDemandBytesMax, or name it with --resource"),
            (Media::Protobuf, "raise limits.protobufBytesMax"),
            (Media::Table, "raise limits.cacheTablesBytesMax"),
        ] {
            let message = message_of_a_full_budget(media);
            assert!(message.ends_with(settings), "{message}");
        }
    }

    #[test]
    fn null_is_read_as_client_go_reads_it() {
        let null = br#"{"metadata":{"resourceVersion":"7","continue":null,"remainingItemCount":null},"items":null}"#;
        assert_eq!(objects_in_all(null), Some(1));
        let page = br#"{"metadata":{"resourceVersion":"7","continue":"a","remainingItemCount":9},"items":[{}]}"#;
        assert_eq!(objects_in_all(page), Some(10));
        assert_eq!(objects_in_all(b"<html>"), None);
    }
}
