//! A resync that comes late. No script can express it: client-go runs the scripts in a world where
//! no thread is ever busy.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use kubefan_client::{FakeListWatch, HandlerFuncs, SharedInformer};
use serde_json::Value;
use tokio::time::{advance, sleep};

#[tokio::test(start_paused = true)]
async fn a_late_resync_does_not_delay_the_next_one_by_a_period() {
    let things = FakeListWatch::new();
    things.put("ns/a", "{}");
    let informer = SharedInformer::<Value>::builder(things).resync_period(Duration::from_secs(10)).build();
    let updates = Arc::new(AtomicUsize::new(0));
    let counted = updates.clone();
    let handler = HandlerFuncs::new().on_update(move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    informer.add_event_handler(handler).unwrap();
    let running = informer.clone();
    tokio::spawn(async move { running.run(std::future::pending::<()>()).await });
    informer.synced().await.unwrap();
    // The thread is busy for 3 ms when the first resync is due. Later ones are on time.
    advance(Duration::from_millis(10_003)).await;
    sleep(Duration::from_secs(31)).await;
    assert_eq!(updates.load(Ordering::Relaxed), 4);
}
