//! Limits of a selector's cost: it is tested for many objects and events, and exists for as long as
//! its watch.

use kubefan_cache::Refusal;
use kubefan_model::{
    SelectorTexts,
    selector::{FieldSelector, LabelSelector, SELECTOR_BYTES_MAX},
};

use kubefan_access::Denial;

/// The limits of a selector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectorLimits {
    /// The most terms of the label selector and the field selector together.
    pub terms_max: usize,
    /// The most values of all terms of the label selector together.
    pub values_max: usize,
}

impl SelectorLimits {
    /// Checks the texts of selectors before they are parsed, which the verdict about a caller
    /// may require and which takes long. Here repeated terms and values count each time. The parser
    /// refuses texts that are too long at once.
    ///
    /// # Errors
    /// [`Denial::Invalid`] if they exceed the limits by far.
    pub fn check_texts(&self, texts: &SelectorTexts) -> Result<(), Denial> {
        let Self { terms_max, values_max } = *self;
        // Each by itself: a selector that is too long must not spare the other its count.
        let counted = |text: &str, count: fn(&str) -> usize| {
            if text.len() > SELECTOR_BYTES_MAX { 0 } else { count(text) }
        };
        let terms = counted(&texts.fields, FieldSelector::count_terms);
        if terms > terms_max {
            let message =
                format!("the selector has {terms} terms; kubefan allows at most {terms_max} (limits.selectorTermsMax)");
            return Err(Denial::Invalid { field: "target.field_selector", message });
        }
        // Commas separate both terms and values.
        let parts = counted(&texts.labels, |labels| 1 + labels.matches(',').count());
        if parts > terms_max.saturating_add(values_max) {
            let message = format!(
                "the selector has {parts} terms and values; kubefan allows at most {terms_max} terms \
                 (limits.selectorTermsMax) and {values_max} values (limits.selectorValuesMax)"
            );
            return Err(Denial::Invalid { field: "target.label_selector", message });
        }
        Ok(())
    }

    /// Checks a label selector and a field selector.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] with the limit that they exceed.
    pub fn check(&self, labels: &LabelSelector, fields: &FieldSelector) -> Result<(), Refusal> {
        let of_labels = labels.requirements().len();
        let of_fields = fields.terms().len();
        let terms = of_labels + of_fields;
        if terms > self.terms_max {
            let field = if of_labels >= of_fields { "target.label_selector" } else { "target.field_selector" };
            let message = format!(
                "the selectors have {terms} terms; kubefan allows at most {} (limits.selectorTermsMax)",
                self.terms_max
            );
            return Err(Refusal::Invalid { field, message });
        }
        let values: usize = labels.requirements().iter().map(|requirement| requirement.values().len()).sum();
        if values > self.values_max {
            let message = format!(
                "the selector has {values} values; kubefan allows at most {} (limits.selectorValuesMax)",
                self.values_max
            );
            return Err(Refusal::Invalid { field: "target.label_selector", message });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_far_beyond_the_limits_are_refused_before_they_are_parsed() {
        let limits = SelectorLimits { terms_max: 100, values_max: 2_000 };
        let check = |labels: String, fields: String| {
            let texts = SelectorTexts { labels, fields, ..SelectorTexts::default() };
            limits.check_texts(&texts).map_err(|denial| match denial {
                Denial::Invalid { field, .. } => field,
                other => panic!("{other:?}"),
            })
        };
        let none = String::new;
        assert_eq!(check(none(), "a=b,".repeat(100)), Ok(()));
        assert_eq!(check(none(), "a=b,".repeat(101)), Err("target.field_selector"));
        assert_eq!(check(none(), format!("a={}", r"\,".repeat(5_000))), Ok(()), "one term");
        let values = |count: usize| vec!["v"; count].join(",");
        assert_eq!(check(format!("app in ({}){}", values(2_000), ",!k".repeat(99)), none()), Ok(()));
        assert_eq!(check(format!("app in ({})", values(2_101)), none()), Err("target.label_selector"));
        let long = || "x,".repeat(SELECTOR_BYTES_MAX);
        assert_eq!(check(long(), long()), Ok(()), "parsing refuses both at once");
        assert_eq!(check(long(), "a=b,".repeat(101)), Err("target.field_selector"));
        assert_eq!(check(format!("app in ({})", values(2_101)), long()), Err("target.label_selector"));
    }

    #[test]
    fn hundreds_of_values_are_allowed_and_hundreds_of_terms_are_not() {
        let limits = SelectorLimits { terms_max: 100, values_max: 2_000 };
        let check = |labels: &str, fields: &str| {
            let labels = LabelSelector::parse(labels).unwrap();
            let fields = FieldSelector::parse(fields).unwrap();
            limits.check(&labels, &fields).map_err(|refusal| match refusal {
                Refusal::Invalid { field, message } => (field, message),
                other => panic!("{other}"),
            })
        };
        let list = |count: usize, separator: &str, each: fn(usize) -> String| {
            (0..count).map(each).collect::<Vec<_>>().join(separator)
        };
        let values = |count| format!("app in ({}),!gone", list(count, ",", |number| format!("v{number}")));
        let absent = |count| list(count, ",", |number| format!("!k{number}"));
        assert_eq!(check(&values(500), "spec.nodeName=n"), Ok(()));
        let (field, message) = check(&values(2_001), "").unwrap_err();
        assert!(field == "target.label_selector" && message.contains("limits.selectorValuesMax"), "{field}: {message}");
        assert_eq!(check(&absent(99), "spec.nodeName=n"), Ok(()));
        let (_, message) = check(&absent(100), "spec.nodeName=n").unwrap_err();
        assert!(message.contains("101 terms") && message.contains("limits.selectorTermsMax"), "{message}");
        let (field, _) = check("", &list(101, ",", |number| format!("metadata.name!=p{number}"))).unwrap_err();
        assert_eq!(field, "target.field_selector");
    }
}
