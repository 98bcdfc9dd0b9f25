//! Seats of API Priority and Fairness, as kube-apiserver charges them
//! (`k8s.io/apiserver/pkg/util/flowcontrol/request`). A request holds seats while it runs. A list,
//! and a watch until it has sent its initial state, holds more of them the more there is to read. A
//! write holds further seats for the watches that it wakes.
//!
//! The seats of a list are those from the watch cache. From etcd a list may cost up to 100.

use super::apiserver_load::ResourceLoad;

/// Bytes of stored objects that a list reads with one seat, since 1.34.
const BYTES_PER_SEAT: f64 = 100_000.0;
/// Objects that a list reads with one seat, until 1.33.
const OBJECTS_PER_SEAT: f64 = 100.0;
/// The most seats of a list. Since 1.34 it counts a megabyte at most, because it is streamed.
const LIST_SEATS_MAX: f64 = 10.0;
/// Watches that a write wakes with one seat. Fewer cost nothing.
const WATCHES_PER_SEAT: f64 = 10.0;
/// The time for which a write holds a seat for its watches.
const SECONDS_PER_SEAT: f64 = 0.005;

/// The seats of a list of the whole resource, or of a watch that begins with its state.
pub(super) fn of_list(load: &ResourceLoad) -> f64 {
    let seats = match load.stored_bytes {
        Some(bytes) => bytes / BYTES_PER_SEAT,
        None => load.objects.unwrap_or(0.0) / OBJECTS_PER_SEAT,
    };
    seats.ceil().clamp(1.0, LIST_SEATS_MAX)
}

/// The seats that writes hold on average, if each of them wakes this many watches.
pub(super) fn of_writes(writes_per_second: f64, watches: f64) -> f64 {
    if watches < WATCHES_PER_SEAT {
        return 0.0;
    }
    writes_per_second * (watches / WATCHES_PER_SEAT).ceil() * SECONDS_PER_SEAT
}

/// The same by the apiserver's count of the watches that all writes of a second woke.
pub(super) fn of_woken(watches_per_second: f64) -> f64 {
    watches_per_second / WATCHES_PER_SEAT * SECONDS_PER_SEAT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_costs_by_its_bytes_and_before_1_34_by_its_objects() {
        let load = |objects, stored_bytes| ResourceLoad { objects, stored_bytes, ..ResourceLoad::default() };
        let cases = [
            (None, None, 1.0),
            (Some(100.0), None, 1.0),
            (Some(101.0), None, 2.0),
            (Some(50_000.0), None, 10.0),
            (Some(50_000.0), Some(99_000.0), 1.0),
            (Some(10.0), Some(350_000.0), 4.0),
            (Some(10.0), Some(1e9), 10.0),
        ];
        for (objects, bytes, seats) in cases {
            assert_eq!(of_list(&load(objects, bytes)), seats, "{objects:?} objects, {bytes:?} bytes");
        }
    }

    #[test]
    fn a_write_holds_seats_from_ten_watches_on() {
        for (watches, seats) in [(0.0, 0.0), (9.0, 0.0), (10.0, 0.5), (11.0, 1.0), (5000.0, 250.0)] {
            let held = of_writes(100.0, watches);
            assert!((held - seats).abs() < 1e-9, "{watches} watches: {held}");
        }
        assert!((of_woken(100.0 * 5000.0) - 250.0).abs() < 1e-9);
    }
}
