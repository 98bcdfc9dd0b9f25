//! A list in the form of a watch (`sendInitialEvents`): the state comes as events, and a bookmark
//! ends it.

use kubefan_cache::{RelistReason, Update};
use kubefan_model::event::EventType;
use tokio::time::Instant;

use crate::{
    error::UpstreamError,
    reflector::{
        Reflector,
        codec::{WatchMessage, read_event},
        error::ReflectorError,
        state::{ListForm, ListWatchState, OpenWatch, ReflectorEvent},
    },
};

impl Reflector {
    /// Opens a watch that begins with the state.
    pub(super) async fn start_watch_list(&mut self, reason: RelistReason) -> Result<ReflectorEvent, ReflectorError> {
        let query = [
            ("watch", "1"),
            ("sendInitialEvents", "true"),
            ("resourceVersionMatch", "NotOlderThan"),
            ("allowWatchBookmarks", "true"),
        ];
        let asked_at = Instant::now();
        match self.open(&query).await {
            Ok(watch) => {
                self.state = ListWatchState::WatchListing { reason, watch };
                Ok(ReflectorEvent::Update { update: Update::ListBegin { reason }, received: asked_at })
            }
            // A server without the feature refuses the parameter (422), or the request (400) if it
            // predates the parameter.
            Err(UpstreamError::Refused { code: 400 | 422, message }) => {
                tracing::info!(resource = %self.target.gvr, message, "upstream does not support WatchList; listing instead");
                self.refused.watch_list = true;
                Ok(self.start_paging(reason, ListForm::Pages))
            }
            Err(error) => Err(ReflectorError::List(error)),
        }
    }

    /// Reads one initial event. Any failure before the bookmark that ends them restarts the list,
    /// because half a state is useless.
    pub(super) async fn read_watch_list(
        &mut self,
        reason: RelistReason,
        mut watch: OpenWatch,
    ) -> Result<ReflectorEvent, ReflectorError> {
        // Replaced below if this line is valid.
        self.state = ListWatchState::Empty { reason, form: ListForm::Pages };
        let line = match watch.lines.next_line().await {
            Ok(Some(line)) => line,
            Ok(None) => return Err(ReflectorError::List(ended_early())),
            Err(error) => {
                // A page may be longer than a line, so a paged list can return this object.
                self.refused.watch_list |= matches!(error, UpstreamError::LineTooLong { .. });
                return Err(ReflectorError::List(error));
            }
        };
        let received = Instant::now();
        let update = match read_event(&self.parser, &line).map_err(ReflectorError::into_list)? {
            WatchMessage::Event(EventType::Added, object) => Update::ListItem(object),
            WatchMessage::Bookmark { version, ends_initial_state: true } => {
                self.state = ListWatchState::Watching { watch, reached: version.end() };
                self.ready.push_back((Update::ListEnd(version.end()), received));
                return Ok(ReflectorEvent::Watching { proven_at: None });
            }
            // A server that ignores the parameters sends the state without an end, or the events of
            // a plain watch.
            WatchMessage::Event(..) | WatchMessage::Bookmark { .. } => {
                self.refused.watch_list = true;
                return Err(ReflectorError::List(UpstreamError::invalid("the server ignores sendInitialEvents")));
            }
        };
        self.state = ListWatchState::WatchListing { reason, watch };
        Ok(ReflectorEvent::Update { update, received })
    }
}

fn ended_early() -> UpstreamError {
    UpstreamError::Reset { message: "the watch ended before the initial state was complete".to_owned() }
}
