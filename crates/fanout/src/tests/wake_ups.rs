//! Wake-ups of a view, and subscriptions that join and leave meanwhile.

use std::{
    sync::Mutex,
    task::{Wake, Waker},
};

use super::*;

/// A task that, when it is woken, drops a subscription and starts another.
struct Leaves {
    hub: Arc<Hub>,
    selection: Selection,
    subscription: Mutex<Option<Subscription>>,
}

impl Wake for Leaves {
    fn wake(self: Arc<Self>) {
        let left = self.subscription.lock().unwrap().take();
        drop(left);
        let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
        let start = Start::Resume(version(10));
        let joined = self.hub.subscribe(self.selection.clone(), Format::default(), start, waker).unwrap();
        *self.subscription.lock().unwrap() = Some(joined);
    }
}

#[tokio::test(start_paused = true)]
async fn joining_and_leaving_do_not_wait_for_a_wave() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 10)], 10);
    let connection = ConnectionWaker::new();
    let waker = StreamWaker::new(&connection, 7);
    let start = Start::Resume(version(10));
    let mut woken = cache.hub.subscribe(cache.select(""), Format::default(), start, waker).unwrap();
    while woken.take(1 << 16).unwrap().is_some() {}
    let leaves = Arc::new(Leaves {
        hub: cache.hub.clone(),
        selection: cache.select(""),
        subscription: Mutex::new(Some(cache.after("", 10).unwrap())),
    });
    connection.register(&Waker::from(leaves.clone()));
    // It wakes the task within the wave, which would wait for itself.
    cache.event(EventType::Modified, "a", "web", 11);
    let mut ready = ReadyStreams::new();
    connection.take_ready(&mut ready);
    assert_eq!(ready.to_vec(), [7]);
    assert!(woken.take(1 << 16).unwrap().is_some());
    assert!(leaves.subscription.lock().unwrap().is_some());
}
