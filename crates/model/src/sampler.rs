//! Chooses the objects that a [`Packer`]'s dictionary is made from.

use std::sync::Arc;

use super::{object::Object, packer::Packer};

/// Chooses samples from a sequence of objects of unknown length, evenly spread over all of it.
///
/// Lists are sorted by key, so the first objects alone would all be from one namespace.
#[derive(Default)]
pub struct Sampler {
    samples: Vec<Arc<Object>>,
    /// Every 2^`stride_log2`-th object becomes a sample. Grows by one whenever there are too many.
    stride_log2: u32,
    seen: usize,
}

impl Sampler {
    /// Maximum number of samples. After this many objects, at least half as many samples exist.
    pub const SAMPLES_MAX: usize = 32;

    /// Considers one object as a sample.
    pub fn look(&mut self, object: &Arc<Object>) {
        if self.seen & ((1 << self.stride_log2) - 1) == 0 {
            if self.samples.len() == Self::SAMPLES_MAX {
                let mut keep = [true, false].into_iter().cycle();
                self.samples.retain(|_| keep.next().unwrap_or_default());
                self.stride_log2 += 1;
            }
            self.samples.push(object.clone());
        }
        self.seen += 1;
    }

    /// The number of objects considered.
    pub fn seen(&self) -> usize {
        self.seen
    }

    /// A packer with a dictionary of the current samples.
    pub fn packer(&self) -> Packer {
        let mut samples: Vec<_> = self.samples.iter().enumerate().collect();
        // Neighbors are most alike, and not all samples may fit into the dictionary. So take one
        // from each half first, then one from each quarter, and so on.
        samples.sort_by_key(|(at, _)| at.reverse_bits());
        Packer::new(samples.into_iter().map(|(_, sample)| sample.bytes()))
    }
}
