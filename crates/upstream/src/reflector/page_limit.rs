//! The number of objects in a page of a list.
//!
//! A page is in memory as a whole, and no budget counts it: 500 objects of 1 MB are 500 MB, twice
//! while they are parsed. So a list of large objects has more pages, each with fewer of them.

/// A page with more bytes had too many objects.
const BYTES_WANTED: usize = 8 << 20;
/// Maximum bytes that are read of a page with several objects.
const BYTES_MAX: usize = 64 << 20;

/// The limit of the next page.
pub(super) struct PageLimit {
    objects: u32,
    objects_max: u32,
}

impl PageLimit {
    /// Begins with the largest limit.
    pub(super) fn new(objects_max: u32) -> Self {
        Self { objects: objects_max, objects_max }
    }

    /// Returns the maximum number of objects in the next page.
    pub(super) fn objects(&self) -> u32 {
        self.objects
    }

    /// Returns the maximum number of bytes that are read of the next page.
    pub(super) fn bytes_max(&self) -> usize {
        if self.objects == 1 { usize::MAX } else { BYTES_MAX }
    }

    /// Adapts the limit to the number of bytes of a page.
    pub(super) fn received(&mut self, bytes: usize) {
        if bytes > BYTES_WANTED {
            let fewer = u64::from(self.objects) * BYTES_WANTED as u64 / bytes as u64;
            self.objects = u32::try_from(fewer).unwrap_or(u32::MAX).max(1);
        } else if bytes < BYTES_WANTED / 4 {
            self.objects = self.objects.saturating_mul(2).min(self.objects_max);
        }
    }

    /// Lowers the limit after a page that was too long. Returns false if it had one object.
    pub(super) fn lower(&mut self) -> bool {
        let is_lower = self.objects > 1;
        self.objects = (self.objects / 8).max(1);
        is_lower
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_large_objects_have_few_of_them_and_grow_again() {
        const OBJECT_BYTES: usize = 1 << 20;
        let mut limit = PageLimit::new(500);
        limit.received(20 * OBJECT_BYTES);
        assert_eq!(limit.objects(), 200, "the last page, of 20 objects, has 200 as well");
        limit.received(200 * OBJECT_BYTES);
        assert_eq!(limit.objects(), 8);
        limit.received(8 * OBJECT_BYTES);
        assert_eq!(limit.objects(), 8, "as wanted");
        limit.received(1000);
        assert_eq!(limit.objects(), 16);
        for _ in 0..10 {
            limit.received(1000);
        }
        assert_eq!(limit.objects(), 500, "no more than was configured");
    }

    #[test]
    fn a_page_that_is_too_long_is_asked_for_in_parts_down_to_one_object() {
        let mut limit = PageLimit::new(500);
        let lowered: Vec<_> =
            std::iter::from_fn(|| limit.lower().then(|| (limit.objects(), limit.bytes_max()))).collect();
        assert_eq!(lowered, [(62, BYTES_MAX), (7, BYTES_MAX), (1, usize::MAX)]);
    }
}
