//! Reads the text format of Prometheus, as far as an apiserver writes it.

/// One line: a metric's name, its labels and its value.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample<'a> {
    pub(super) name: &'a str,
    labels: Vec<(&'a str, String)>,
    pub(super) value: f64,
}

impl Sample<'_> {
    /// The value of a label; empty without it, as Prometheus has it.
    pub(super) fn label(&self, name: &str) -> &str {
        self.labels.iter().find(|(found, _)| *found == name).map_or("", |(_, value)| value)
    }
}

/// The samples whose names `is_wanted`. Lines that are no samples are left out.
pub(super) fn samples<'a>(
    text: &'a str,
    is_wanted: impl Fn(&str) -> bool + 'a,
) -> impl Iterator<Item = Sample<'a>> + 'a {
    text.lines().filter(move |line| is_wanted(name_of(line))).filter_map(sample)
}

fn name_of(line: &str) -> &str {
    line.split(['{', ' ']).next().unwrap_or_default()
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let name = name_of(line);
    let rest = &line[name.len()..];
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    // A timestamp may follow.
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name, labels, value })
}

type Labels<'a> = (Vec<(&'a str, String)>, &'a str);

/// Reads labels up to the closing brace. Returns them and the rest.
fn labels(mut text: &str) -> Option<Labels<'_>> {
    let mut labels = Vec::new();
    loop {
        text = text.trim_start_matches([',', ' ']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, rest) = text.split_once("=\"")?;
        let (value, rest) = quoted(rest)?;
        labels.push((name.trim(), value));
        text = rest;
    }
}

/// Reads up to the closing quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_names_labels_and_values() {
        let text = "# HELP a_total Help.\n# TYPE a_total counter\na_total{group=\"\",resource=\"pods\"} 12\nb 1.5e+06 1700000000\n\
            c{path=\"a\\\"b\\\\c\\n,}\"} +Inf\nwrong{\nalso wrong\n";
        let all: Vec<_> = samples(text, |name| !name.starts_with('#')).collect();
        assert_eq!(all.len(), 3, "{all:?}");
        assert_eq!((all[0].name, all[0].label("resource"), all[0].value), ("a_total", "pods", 12.0));
        assert_eq!((all[0].label("group"), all[0].label("none")), ("", ""));
        assert_eq!((all[1].name, all[1].value), ("b", 1.5e6));
        assert_eq!((all[2].label("path"), all[2].value), ("a\"b\\c\n,}", f64::INFINITY));
        assert_eq!(samples(text, |name| name == "b").count(), 1);
    }
}
