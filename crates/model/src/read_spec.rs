//! The selectors of a read, parsed once for all that look at them.
//!
//! Authorization, the selection in a cache and the audit log read the same selectors. If each of
//! them parsed the texts, two of them could disagree about an invalid one. So a text that is no
//! selector is a value here: each reader of it decides what that means.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use super::selector::{FieldSelector, LabelSelector, SelectorError, ShardSelector};

/// The texts of selectors; an empty one selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SelectorTexts {
    /// The label selector.
    pub labels: String,
    /// The field selector.
    pub fields: String,
    /// The shard selector.
    pub shard: String,
}

/// The selectors of a read. Parsing takes long, and many reads are decided without it, so each text
/// is parsed when it is first needed. A clone shares the result.
#[derive(Clone, Default)]
pub struct ReadSpec(Arc<Selectors>);

#[derive(Default)]
struct Selectors {
    texts: SelectorTexts,
    labels: OnceLock<Result<LabelSelector, SelectorError>>,
    fields: OnceLock<Result<FieldSelector, SelectorError>>,
    shard: OnceLock<Result<Option<ShardSelector>, SelectorError>>,
}

impl ReadSpec {
    /// The selectors with these texts.
    pub fn new(texts: SelectorTexts) -> Self {
        Self(Arc::new(Selectors { texts, ..Selectors::default() }))
    }

    /// The texts, as they were given.
    pub fn texts(&self) -> &SelectorTexts {
        &self.0.texts
    }

    /// Whether all texts are empty.
    pub fn is_empty(&self) -> bool {
        let SelectorTexts { labels, fields, shard } = self.texts();
        labels.is_empty() && fields.is_empty() && shard.is_empty()
    }

    /// The label selector.
    ///
    /// # Errors
    /// The reason why the text is not a label selector.
    pub fn labels(&self) -> Result<&LabelSelector, &SelectorError> {
        self.0.labels.get_or_init(|| LabelSelector::parse(&self.0.texts.labels)).as_ref()
    }

    /// The field selector.
    ///
    /// # Errors
    /// The reason why the text is not a field selector.
    pub fn fields(&self) -> Result<&FieldSelector, &SelectorError> {
        self.0.fields.get_or_init(|| FieldSelector::parse(&self.0.texts.fields)).as_ref()
    }

    /// The shard selector; `None` if its text is empty.
    ///
    /// # Errors
    /// The reason why the text is not a shard selector.
    pub fn shard(&self) -> Result<Option<&ShardSelector>, &SelectorError> {
        let parse = || {
            let text = &self.0.texts.shard;
            if text.is_empty() { Ok(None) } else { ShardSelector::parse(text).map(Some) }
        };
        self.0.shard.get_or_init(parse).as_ref().map(Option::as_ref)
    }

    /// The size of the texts, in bytes.
    pub fn bytes(&self) -> usize {
        let SelectorTexts { labels, fields, shard } = self.texts();
        labels.len() + fields.len() + shard.len()
    }

    /// Whether a text was parsed.
    pub fn is_parsed(&self) -> bool {
        let Selectors { labels, fields, shard, .. } = &*self.0;
        labels.get().is_some() || fields.get().is_some() || shard.get().is_some()
    }
}

impl PartialEq for ReadSpec {
    fn eq(&self, other: &Self) -> bool {
        self.texts() == other.texts()
    }
}

impl Eq for ReadSpec {}

impl fmt::Debug for ReadSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.texts().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(labels: &str, fields: &str, shard: &str) -> ReadSpec {
        let [labels, fields, shard] = [labels, fields, shard].map(str::to_owned);
        ReadSpec::new(SelectorTexts { labels, fields, shard })
    }

    #[test]
    fn each_text_is_parsed_once_and_only_if_it_is_needed() {
        let spec = spec("app=web", "spec.nodeName=n", "");
        let clone = spec.clone();
        assert!(!spec.is_parsed() && spec.bytes() == 22);
        let labels = spec.labels().unwrap();
        let fields = spec.fields().unwrap();
        assert_eq!((labels.requirements().len(), fields.terms().len()), (1, 1));
        assert!(std::ptr::eq(labels, clone.labels().unwrap()), "a clone shares the result");
        assert!(clone.is_parsed());
    }

    #[test]
    fn an_invalid_text_is_a_value() {
        let invalid = spec("=", "a", "x");
        let message = |error: &SelectorError| error.message().to_owned();
        assert_eq!(invalid.labels().map_err(message), LabelSelector::parse("=").as_ref().map_err(message));
        assert_eq!(invalid.fields().map_err(message), FieldSelector::parse("a").as_ref().map_err(message));
        assert!(invalid.shard().is_err());
        assert_ne!(invalid, spec("", "a", "x"));
    }

    #[test]
    fn an_empty_text_selects_everything() {
        let empty = ReadSpec::default();
        assert!(empty.is_empty() && empty.labels().unwrap().is_everything() && empty.fields().unwrap().is_everything());
        assert_eq!(empty.shard(), Ok(None));
        assert!(!spec("", "", "x").is_empty());
    }
}
