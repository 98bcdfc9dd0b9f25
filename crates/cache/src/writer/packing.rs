//! Packs the objects of a cache for its writer: the dictionary, and the time to make it.

use std::sync::Arc;

use kubefan_model::{object::Object, packer::Packer, sampler::Sampler};

use crate::store::Store;

/// Storage of objects while nothing reads them.
#[derive(Default)]
pub(super) struct Packing {
    /// The current objects are packed too, not only the replaced ones.
    pub(super) pack_current: bool,
    pub(super) packer: Arc<Packer>,
    /// Collects samples for the dictionary; `None` once it is made.
    pub(super) sampler: Option<Sampler>,
}

impl Packing {
    /// With fewer objects a dictionary is not worth its own size.
    const SAMPLES_LEAST: usize = 16;

    fn make_packer(&mut self) {
        if let Some(sampler) = &self.sampler {
            self.packer = Arc::new(sampler.packer());
        }
    }

    pub(super) fn current(&self, object: &Arc<Object>) -> Arc<Object> {
        if self.pack_current { object.packed(&self.packer) } else { object.clone() }
    }

    /// An item of a list, as it is stored. The first ones stay unpacked in `store` until there is a
    /// dictionary.
    pub(super) fn list_item(&mut self, object: Arc<Object>, store: &mut Store) -> Arc<Object> {
        let Some(sampler) = &mut self.sampler else { return self.current(&object) };
        sampler.look(&object);
        if !self.pack_current || self.packer.has_dictionary() {
            return self.current(&object);
        }
        if sampler.seen() == Sampler::SAMPLES_MAX {
            self.make_packer();
            self.pack_all(store);
            return self.current(&object);
        }
        object
    }

    /// The list is complete: makes the dictionary from all of it, which is used until the next
    /// list.
    pub(super) fn list_end(&mut self, store: &mut Store) {
        if self.sampler.as_ref().is_some_and(|sampler| sampler.seen() >= Self::SAMPLES_LEAST) {
            self.make_packer();
            self.sampler = None;
        }
        if self.pack_current && store.len() < Sampler::SAMPLES_MAX {
            self.pack_all(store);
        }
    }

    /// Makes the dictionary of a resource that started with few objects once there were enough.
    pub(super) fn event(&mut self, object: &Arc<Object>) {
        if let Some(sampler) = &mut self.sampler {
            sampler.look(object);
            if sampler.seen() >= Sampler::SAMPLES_MAX {
                self.make_packer();
                self.sampler = None;
            }
        }
    }

    fn pack_all(&self, store: &mut Store) {
        let plain: Vec<_> = store.iter().filter(|object| !object.is_packed()).cloned().collect();
        for object in &plain {
            store.insert(object.packed(&self.packer));
        }
    }
}
