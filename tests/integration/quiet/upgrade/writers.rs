//! Writers that change objects while the apiserver is replaced. Each write is repeated until the
//! apiserver has it.

use std::time::Duration;

use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};

use super::LAST;
use crate::{
    harness::{apiserver::ApiServer, wait},
    quiet::cluster::Kind,
};

/// Longest time without an apiserver.
const OUTAGE_MAX: Duration = Duration::from_secs(120);
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Running writers, one for each kind.
pub(super) struct Writers {
    stop: watch::Sender<bool>,
    writers: JoinSet<usize>,
    client: Client,
    url: String,
}

/// Starts to write to the first `objects` objects of each kind.
pub(super) fn begin(api: &ApiServer, url: &str, kinds: &[Kind], objects: usize, per_second: u32) -> Writers {
    let (stop, stopped) = watch::channel(false);
    let mut writers = JoinSet::new();
    for &kind in kinds {
        let (client, url, stopped) = (api.client(), url.to_owned(), stopped.clone());
        writers.spawn(async move {
            let mut ticks = interval(Duration::from_secs(1) / per_second);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut count = 0;
            while !*stopped.borrow() {
                ticks.tick().await;
                step(&client, &url, &kind, count, objects).await;
                count += 1;
            }
            count
        });
    }
    Writers { stop, writers, client: api.client(), url: url.to_owned() }
}

impl Writers {
    /// Stops the writers and creates the last object of each kind. Returns the number of writes.
    pub(super) async fn end(self, kinds: &[Kind]) -> usize {
        self.stop.send_replace(true);
        let written = self.writers.join_all().await.into_iter().sum();
        for kind in kinds {
            let collection = kind.path_in("default");
            send(&self.client, Method::POST, format!("{}{collection}", self.url), Some(kind.object(LAST))).await;
        }
        written
    }
}

/// Changes an object; every fifth time deletes it and creates it again.
async fn step(client: &Client, url: &str, kind: &Kind, count: usize, objects: usize) {
    let name = format!("o-{}", count % objects);
    let collection = format!("{url}{}", kind.path_in("default"));
    if count % 5 == 4 {
        send(client, Method::DELETE, format!("{collection}/{name}"), None).await;
        send(client, Method::POST, collection, Some(kind.object(&name))).await;
        return;
    }
    let patch = json!({ "metadata": { "labels": { "write": count.to_string() } } });
    send(client, Method::PATCH, format!("{collection}/{name}"), Some(patch)).await;
}

/// Sends a write until the apiserver has it.
async fn send(client: &Client, method: Method, url: String, body: Option<Value>) {
    let media = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
    wait::until(&format!("the apiserver to take {method} {url}"), OUTAGE_MAX, || async {
        let request = client.request(method.clone(), &url).timeout(ANSWER_MAX).header("content-type", media);
        let request = match &body {
            Some(body) => request.body(body.to_string()),
            None => request,
        };
        let status = request.send().await.ok()?.status();
        // The apiserver may have applied the write without an answer.
        let was_applied = match method {
            Method::POST => status == StatusCode::CONFLICT,
            Method::DELETE => status == StatusCode::NOT_FOUND,
            _ => false,
        };
        (status.is_success() || was_applied).then_some(())
    })
    .await;
}
