//! A list in pages: each page is requested again if it fails for a moment, and an expired continue
//! token leads to one list without pages.
//!
//! A large list has hundreds of pages. If one failure discarded all of them, a list would hardly
//! ever complete while one request in a hundred is refused.

use kubefan_cache::{RelistReason, Update};
use kubefan_model::ResourceVersion;
use rand::Rng;
use tokio::time::Instant;

use crate::{
    client::Verb,
    error::UpstreamError,
    reflector::{
        Reflector,
        codec::{Page, read_page},
        error::ReflectorError,
        state::{ListWatchState, PagedList, ReflectorEvent},
    },
};

impl<R: Rng> Reflector<R> {
    /// Requests the next page.
    pub(super) async fn page(&mut self, mut list: PagedList) -> Result<ReflectorEvent, ReflectorError> {
        // Loops until there is an update: with a selector, a page can be empty without being the
        // last.
        loop {
            let exact = self.backfills_from;
            let path = self.page_path(list.next.as_deref(), exact, !self.unpaged);
            let bytes_max = if self.unpaged { usize::MAX } else { self.page_limit.bytes_max() };
            let body = match self.upstream.get_media(Verb::List, &path, self.parser.media(), bytes_max).await {
                Ok((body, warnings)) => {
                    self.warnings = warnings;
                    body
                }
                Err(UpstreamError::TooLarge { .. }) if !self.unpaged && self.page_limit.lower() => continue,
                Err(error) => return Err(self.page_failed(list, error)),
            };
            if !self.unpaged {
                self.page_limit.received(body.len());
            }
            let received = Instant::now();
            let page = read_page(&self.parser, &self.target, &body)?;
            let Page { version: page_version, next, objects } = page.after(list.next.as_deref())?;
            let list_version = *list.version.get_or_insert(page_version);
            self.ready = objects.into_iter().map(|object| (Update::ListItem(object), received)).collect();
            (list.next, list.failures) = (next, None);
            if list.next.is_none() {
                (self.unpaged, self.next_is_paged) = (false, false);
                self.ready.push_back((Update::ListEnd(list_version.end()), received));
            }
            if let Some((update, received)) = self.ready.pop_front() {
                self.state = match list {
                    PagedList { next: Some(_), .. } => ListWatchState::Paging(list),
                    // The watch is another request: etcd may be restored before it arrives.
                    _ => ListWatchState::Listed { reached: list_version.end(), in_doubt: true },
                };
                return Ok(ReflectorEvent::Update { update, received });
            }
        }
    }

    /// The path of a page: the first one, of the state at `exact` if that is given, or the one that
    /// the token `next` leads to. Without `has_limit` a page has all objects.
    pub(super) fn page_path(&self, next: Option<&str>, exact: Option<ResourceVersion>, has_limit: bool) -> String {
        let limit = self.page_limit.objects().to_string();
        let limit = Some(("limit", limit.as_str())).filter(|_| has_limit);
        let mut query: Vec<_> = limit.into_iter().chain(next.map(|next| ("continue", next))).collect();
        let exact = exact.filter(|_| next.is_none()).map(|version| version.whole().to_string());
        if let Some(version) = &exact {
            query.extend([("resourceVersion", version.as_str()), ("resourceVersionMatch", "Exact")]);
        }
        self.path(&query)
    }

    /// Continues a list after a page has failed, or starts it over.
    fn page_failed(&mut self, mut list: PagedList, error: UpstreamError) -> ReflectorError {
        let is_expired = matches!(error, UpstreamError::Gone { .. });
        // A single answer for all objects may be too long or too slow, so it is tried once. These
        // failures say nothing about that.
        self.unpaged &= matches!(error, UpstreamError::TooManyRequests { .. } | UpstreamError::Unreachable { .. });
        self.state = if error.is_passing() && list.page_may_be_retried(Instant::now()) {
            ListWatchState::Paging(list)
        } else if is_expired && list.next.is_some() {
            // etcd compacted the version of the pages meanwhile. A list without pages cannot expire
            // (client-go's pager does the same).
            self.unpaged = true;
            ListWatchState::Empty { reason: RelistReason::ContinueExpired }
        } else {
            ListWatchState::Empty { reason: list.reason }
        };
        ReflectorError::List(error)
    }
}
