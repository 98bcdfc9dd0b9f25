//! Parts of the Kubernetes API that are alpha in the apiserver, by the names of its feature gates.
//!
//! kubefan answers them from its caches, whatever the apiserver's version. The hazard is an
//! apiserver that ignores unknown parameters: it would answer a request for a shard with every
//! object. So a list or a watch that needs one of these is never forwarded, nor is the deletion of
//! a shard.

use std::fmt;

/// The parts that are on. All are off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FeatureGates {
    /// `shardSelector` in lists and watches (KEP-5866).
    pub sharded_list_and_watch: bool,
    /// `drop=metadata.managedFields` in `Accept` (KEP-5958).
    pub managed_fields_opt_out: bool,
}

impl FeatureGates {
    /// Sets a gate, given as `NAME=true` or `NAME=false`.
    ///
    /// # Errors
    /// A text that says what to write instead.
    pub fn set(&mut self, text: &str) -> Result<(), String> {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let gates = [
            ("ManagedFieldsOptOut", &mut self.managed_fields_opt_out),
            ("ShardedListAndWatch", &mut self.sharded_list_and_watch),
        ];
        let names = gates.each_ref().map(|(name, _)| *name);
        let found = gates.into_iter().find(|(known, _)| *known == name.trim());
        let (_, gate) = found.ok_or_else(|| format!("no such feature gate; kubefan has {}", names.join(" and ")))?;
        *gate = value.trim().parse().map_err(|_| format!("write it like {name}=true"))?;
        Ok(())
    }
}

/// The part of a request that only kubefan is sure to honor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheOnly {
    /// Only the objects of a shard.
    ShardSelector,
    /// Objects without managed fields.
    ManagedFieldsOptOut,
}

impl fmt::Display for CacheOnly {
    /// Names the part, and the remedy if the cache cannot answer the request.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ShardSelector => {
                "a request with shardSelector is answered from kubefan's cache or not at all, because the apiserver may ignore \
                 the parameter and answer with all objects; leave it out to ask the apiserver"
            }
            Self::ManagedFieldsOptOut => {
                "a request with drop=metadata.managedFields in Accept is answered from kubefan's cache or not at all, because \
                 the apiserver may ignore the parameter; leave it out, or add a media type without it, to ask the apiserver"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_is_set_by_its_name_in_the_apiserver() {
        let mut gates = FeatureGates::default();
        gates.set("ShardedListAndWatch=true").unwrap();
        assert_eq!(gates, FeatureGates { sharded_list_and_watch: true, managed_fields_opt_out: false });
        gates.set("ShardedListAndWatch=false").unwrap();
        gates.set(" ManagedFieldsOptOut = true").unwrap();
        assert_eq!(gates, FeatureGates { sharded_list_and_watch: false, managed_fields_opt_out: true });
        for wrong in ["", "Sharding=true", "ShardedListAndWatch", "ShardedListAndWatch=on"] {
            assert!(gates.set(wrong).is_err(), "{wrong}");
        }
    }
}
