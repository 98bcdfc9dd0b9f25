//! Lists within a budget: from kubefan, or from the apiserver while kubefan is gone.
//!
//! The pages of a list must come from one server, because a token is only valid at the server that
//! gave it. So the tokens of the apiserver are marked. Only its first page waits for a start.

use std::sync::atomic::Ordering;

use kubefan_common::backoff::Backoff;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::time::{Instant, sleep};

use super::{
    outage::{Outage, turn_of},
    servers::Servers,
};
use crate::{
    error::ClientError,
    lister_watcher::{ListOptions, ListPage},
};

/// Marks a token of the apiserver. No server begins a token with a space.
const OF_APISERVER: &str = " apiserver ";

/// Returns a page.
///
/// # Errors
/// The server's error. No connection to kubefan is none: another attempt follows, or a start at the
/// apiserver.
pub(super) async fn page(servers: &Servers, outage: &Outage, options: ListOptions) -> Result<ListPage, ClientError> {
    if let Some(token) = options.continue_token.strip_prefix(OF_APISERVER) {
        let continue_token = token.to_owned();
        return Ok(marked(servers.apiserver.list(ListOptions { continue_token, ..options }).await?));
    }
    if !options.continue_token.is_empty() {
        return outage.note_result(servers.kubefan.list(options).await, false);
    }
    let kubefan = &servers.kubefan;
    let next_turn = || outage.next_turn(false, kubefan.fallback_budget());
    let mut backoff = Backoff::new(outage.backoff());
    let mut random = SmallRng::seed_from_u64(outage.jitter_seed());
    let mut attempt = kubefan.list(options.clone());
    let mut turn = next_turn();
    loop {
        let error = tokio::select! {
            biased;
            page = &mut attempt => match outage.note_result(page, false) {
                Err(error) if outage.since().is_some() && !error.is_resource_version_too_large() => error,
                page => return page,
            },
            () = turn_of(&turn) => {
                if turn.take().is_some_and(|turn| outage.admits(&turn)) {
                    break;
                }
                continue;
            }
        };
        turn = turn.or_else(next_turn);
        let delay = backoff.next_delay(Instant::now(), error.retry_after(), &mut random);
        let options = options.clone();
        attempt = Box::pin(async move {
            sleep(delay).await;
            kubefan.list(options).await
        });
    }
    drop(attempt);
    servers.apiserver_starts.fetch_add(1, Ordering::Relaxed);
    let page = servers.apiserver.list(options).await;
    if let (Err(error), Some(starts)) = (&page, outage.starts()) {
        starts.delay(error.retry_after().unwrap_or_default());
    }
    Ok(marked(page?))
}

fn marked(page: ListPage) -> ListPage {
    let is_last = page.continue_token.is_empty();
    let continue_token = if is_last { String::new() } else { format!("{OF_APISERVER}{}", page.continue_token) };
    ListPage { continue_token, ..page }
}
