//! A list of the objects at the version of an open watch, beside it: after a change of the schema,
//! the same versions of objects may have other bytes, which no event shows.
//!
//! A slow list must not delay events. So each step waits for the next page and for the next event
//! of the watch, and takes the first of them. A page comes first if both are there: their number is
//! limited, so they cannot keep events waiting for long. If the watch ends, the list is given up,
//! because a new watch is more urgent.

use std::time::Duration;

use kubefan_cache::{RelistReason, Update};
use kubefan_model::ResourceVersion;
use tokio::time::{Instant, sleep};

use crate::{
    client::Verb,
    error::UpstreamError,
    reflector::{
        Reflector,
        codec::{Page, read_page},
        error::ReflectorError,
        state::{Input, ListWatchState, NextStep, PageRequest, ReflectorEvent, Reread},
    },
};

/// Maximum failures of a page in a row.
const PAGE_FAILURES_MAX: usize = 3;

impl Reflector {
    /// Lists the objects again at the version of the open watch, for `reason`. Without an open
    /// watch this does nothing.
    pub fn reread(&mut self, reason: RelistReason) {
        if self.next_step() != NextStep::ReadWatch {
            return;
        }
        let lost = ListWatchState::empty(reason);
        let (watch, reached) = match std::mem::replace(&mut self.state, lost) {
            ListWatchState::Watching { watch, reached } | ListWatchState::Rereading(Reread { watch, reached, .. }) => {
                (watch, reached)
            }
            other => {
                self.state = other;
                return;
            }
        };
        self.ready.push_back((Update::ListBegin { reason }, Instant::now()));
        let at = reached.whole();
        let request = self.request_page(at, None, Duration::ZERO);
        self.state = ListWatchState::Rereading(Reread { reason, at, next: None, failures: 0, request, watch, reached });
    }

    /// Returns the request of a page of the list at a version. It is sent when it is polled.
    fn request_page(&self, at: ResourceVersion, next: Option<&str>, delay: Duration) -> PageRequest {
        let path = self.page_path(next, Some(at), true);
        let upstream = self.upstream.clone();
        let media = self.parser.media();
        let bytes_max = self.page_limit.bytes_max();
        Box::pin(async move {
            if !delay.is_zero() {
                sleep(delay).await;
            }
            upstream.get_media(Verb::List, &path, media, bytes_max).await
        })
    }

    /// Takes the input that came first. `None` if there is no update yet.
    pub(super) fn read_beside(
        &mut self,
        reread: Reread,
        input: Input,
    ) -> Result<Option<ReflectorEvent>, ReflectorError> {
        match input {
            Input::Nothing => {
                self.state = ListWatchState::Rereading(reread);
                Ok(None)
            }
            Input::Page(Ok((body, warnings))) => {
                self.warnings = warnings;
                self.read_page_beside(reread, &body).map(|()| None)
            }
            Input::Page(Err(error)) => self.page_beside_failed(reread, error).map(|()| None),
            Input::Line(line) => {
                let Reread { reason, at, next, failures, request, watch, reached } = reread;
                let step = self.read_watch(watch, reached, line);
                let lost = ListWatchState::empty(reason);
                self.state = match std::mem::replace(&mut self.state, lost) {
                    ListWatchState::Watching { watch, reached } => {
                        ListWatchState::Rereading(Reread { reason, at, next, failures, request, watch, reached })
                    }
                    ended => ended,
                };
                step.map(Some)
            }
        }
    }

    fn read_page_beside(&mut self, mut reread: Reread, body: &[u8]) -> Result<(), ReflectorError> {
        let received = Instant::now();
        self.page_limit.received(body.len());
        let page = read_page(&self.parser, &self.target, body)?;
        let Page { version, next, objects } = page.after(reread.next.as_deref())?;
        if version != reread.at {
            let why = format!("a list at version {version} instead of exactly {}", reread.at);
            return Err(ReflectorError::List(UpstreamError::invalid(why)));
        }
        self.ready.extend(objects.into_iter().map(|object| (Update::ListItem(object), received)));
        self.state = match next {
            Some(_) => {
                reread.request = self.request_page(reread.at, next.as_deref(), Duration::ZERO);
                reread.next = next;
                reread.failures = 0;
                ListWatchState::Rereading(reread)
            }
            None => {
                self.ready.push_back((Update::ListEnd(reread.at.end()), received));
                reread.without_list()
            }
        };
        Ok(())
    }

    /// Requests a page again that has failed for a moment, or gives up the list. If upstream cannot
    /// list that version, an ordinary list follows.
    fn page_beside_failed(&mut self, mut reread: Reread, error: UpstreamError) -> Result<(), ReflectorError> {
        if matches!(error, UpstreamError::TooLarge { .. }) && self.page_limit.lower() {
            reread.request = self.request_page(reread.at, reread.next.as_deref(), Duration::ZERO);
            self.state = ListWatchState::Rereading(reread);
            return Ok(());
        }
        let is_passing = error.is_passing();
        reread.failures += 1;
        let failed = ReflectorError::List(error);
        if is_passing && reread.failures <= PAGE_FAILURES_MAX {
            let delay = failed.page_retry_delay();
            tracing::info!(resource = %self.target.gvr, error = %failed, ?delay, "a page failed; it is requested again");
            reread.request = self.request_page(reread.at, reread.next.as_deref(), delay);
            self.state = ListWatchState::Rereading(reread);
            return Ok(());
        }
        self.state = if is_passing { reread.without_list() } else { ListWatchState::empty(reread.reason) };
        Err(failed)
    }
}
