use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::UNIX_EPOCH,
};

use kubefan_telemetry::metrics::Metrics;

use super::*;
use crate::queue::{NotRecorded, Queue};

/// A disk that may be full.
#[derive(Clone, Default)]
struct Disk {
    is_full: Arc<AtomicBool>,
    writes: Arc<AtomicUsize>,
    text: Arc<Mutex<Vec<u8>>>,
}

impl Sink for Disk {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        if self.is_full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.text.lock().unwrap().extend_from_slice(lines);
        Ok(())
    }
}

impl Disk {
    fn text(&self) -> String {
        String::from_utf8(self.text.lock().unwrap().clone()).unwrap()
    }
}

struct World {
    queue: Queue,
    disk: Disk,
    closing: CancellationToken,
    metrics: AuditMetrics,
    task: tokio::task::JoinHandle<()>,
}

fn world(is_full: bool, is_strict: bool) -> World {
    let metrics = Metrics::new(prometheus::Registry::new()).unwrap().audit().clone();
    let (queue, lines) = Queue::new(3, is_strict, || UNIX_EPOCH, metrics.clone());
    let disk = Disk::default();
    let closing = CancellationToken::new();
    disk.is_full.store(is_full, Ordering::Relaxed);
    let task = tokio::spawn(run(lines, disk.clone(), closing.clone(), metrics.clone()));
    World { queue, disk, closing, metrics, task }
}

fn line(number: usize) -> Vec<u8> {
    format!("{number}\n").into_bytes()
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_drops_new_records_and_counts_them() {
    let World { queue, disk, metrics, task, .. } = world(false, false);
    // The writer has not run yet.
    for number in 0..5 {
        queue.push(line(number));
    }
    assert_eq!(metrics.dropped.get(), 2);
    drop(queue);
    task.await.unwrap();
    assert_eq!(disk.text(), "0\n1\n2\n");
    assert_eq!((metrics.written.get(), disk.writes.load(Ordering::Relaxed)), (3, 1), "one write for all");
}

#[tokio::test(start_paused = true)]
async fn large_records_fill_the_queue_by_their_bytes() {
    let World { queue, disk, metrics, task, .. } = world(false, true);
    let large = || vec![b'x'; 40 << 10];
    queue.push(large());
    queue.push(large());
    assert_eq!(metrics.dropped.get(), 1);
    let place = queue.place(large().len()).await.unwrap();
    assert_eq!(place.write(large()).await, Ok(()), "it waits until what is written has left the queue");
    assert_eq!((metrics.dropped.get(), metrics.rejected.get()), (1, 0));
    drop(queue);
    task.await.unwrap();
    assert_eq!(disk.text().len(), 2 * large().len());
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_was_full_gets_the_waiting_records_in_order() {
    let World { queue, disk, metrics, task, .. } = world(true, false);
    queue.push(line(0));
    sleep(3 * RETRY / 2).await;
    assert_eq!(metrics.write_errors.get(), 2, "at once and after the pause");
    for number in 1..6 {
        queue.push(line(number));
    }
    disk.is_full.store(false, Ordering::Relaxed);
    sleep(RETRY).await;
    assert_eq!(disk.text(), "0\n1\n2\n3\n");
    assert_eq!((metrics.written.get(), metrics.dropped.get()), (4, 2));
    drop(queue);
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_failed_record_fails_its_waiter_and_is_not_written_later() {
    let World { queue, disk, metrics, task, .. } = world(true, true);
    let wait = async |number| queue.place(line(number).len()).await?.write(line(number)).await;
    assert_eq!(wait(0).await, Err(NotRecorded));
    disk.is_full.store(false, Ordering::Relaxed);
    assert_eq!(wait(1).await, Ok(()));
    assert_eq!(disk.text(), "1\n");
    assert_eq!((metrics.rejected.get(), metrics.written.get(), metrics.dropped.get()), (1, 1, 0));
    drop(queue);
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_closed_writer_writes_its_queue_and_ends_although_requests_are_open() {
    let World { queue, disk, closing, task, .. } = world(false, false);
    for number in 0..3 {
        queue.push(line(number));
    }
    closing.cancel();
    task.await.unwrap();
    assert_eq!(disk.text(), "0\n1\n2\n");
    drop(queue);
}

#[tokio::test(start_paused = true)]
async fn a_closed_writer_does_not_wait_for_a_full_disk() {
    let World { queue, closing, metrics, task, .. } = world(true, false);
    for number in 0..3 {
        queue.push(line(number));
    }
    sleep(RETRY / 2).await;
    closing.cancel();
    task.await.unwrap();
    assert_eq!((metrics.written.get(), metrics.dropped.get()), (0, 3));
    drop(queue);
}
