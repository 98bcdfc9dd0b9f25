//! A list in pages: each page is requested again if it fails for a moment, and an expired continue
//! token leads to one list without pages.
//!
//! A large list has hundreds of pages. If one failure discarded all of them, a list would hardly
//! ever complete while one request in a hundred is refused.

use kubefan_cache::Update;
use kubefan_model::ResourceVersion;
use tokio::time::Instant;

use crate::{
    client::Verb,
    error::UpstreamError,
    reflector::{
        Reflector,
        codec::{Page, read_page},
        error::ReflectorError,
        state::{Doubt, ListWatchState, PagedList, ReflectorEvent},
    },
};

impl Reflector {
    /// Requests the next page.
    pub(super) async fn page(&mut self, mut list: PagedList) -> Result<ReflectorEvent, ReflectorError> {
        // Loops until there is an update: with a selector, a page can be empty without being the
        // last.
        loop {
            let exact = self.backfills_from;
            let path = self.page_path(list.next.as_deref(), exact, !list.is_whole());
            let bytes_max = if list.is_whole() { usize::MAX } else { self.page_limit.bytes_max() };
            let body = match self.upstream.get_media(Verb::List, &path, self.parser.media(), bytes_max).await {
                Ok((body, warnings)) => {
                    self.warnings = warnings;
                    body
                }
                Err(UpstreamError::TooLarge { .. }) if !list.is_whole() && self.page_limit.lower() => continue,
                Err(error) => {
                    self.state = list.after_failure(&error, Instant::now());
                    return Err(ReflectorError::List(error));
                }
            };
            if !list.is_whole() {
                self.page_limit.received(body.len());
            }
            let received = Instant::now();
            let page = read_page(&self.parser, &self.target, &body)?;
            let Page { version: page_version, next, objects } = page.after(list.next.as_deref())?;
            let list_version = *list.version.get_or_insert(page_version);
            self.ready = objects.into_iter().map(|object| (Update::ListItem(object), received)).collect();
            list.next = next;
            list.failures = None;
            if list.next.is_none() {
                self.ready.push_back((Update::ListEnd(list_version.end()), received));
            }
            if let Some((update, received)) = self.ready.pop_front() {
                self.state = match list {
                    PagedList { next: Some(_), .. } => ListWatchState::Paging(list),
                    // The watch is another request: etcd may be restored before it arrives.
                    _ => ListWatchState::Listed { reached: list_version.end(), doubt: Doubt::AsksAfter },
                };
                return Ok(ReflectorEvent::Update { update, received });
            }
        }
    }

    /// Returns the path of a page: the first one, of the state at `exact` if that is given, or the
    /// one that the token `next` leads to. Without `has_limit` a page has all objects.
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
}
