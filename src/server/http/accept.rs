//! Content negotiation: which form of the objects a request wants (`negotiation.NegotiateMediaTypeOptions` in the apiserver).
//!
//! Clauses are taken by their quality, then by how specific they are, and the first that the apiserver could serve decides. What that form
//! is made from here is served from the cache; for all others upstream is asked, and for what nobody serves too: its 406 lists the types.

/// The form of the objects in a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As they are, as JSON.
    Json,
    /// Their metadata, as JSON.
    PartialJson,
    /// One that is not made here.
    Other,
}

/// A media type with its parameters.
struct Clause<'a> {
    kind: &'a str,
    subtype: &'a str,
    params: Vec<(&'a str, &'a str)>,
    quality: f32,
}

impl<'a> Clause<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let (kind, subtype) = match parts.next()? {
            "" => return None,
            // As the library that the apiserver uses reads it.
            "*" => ("*", "*"),
            media => media.split_once('/')?,
        };
        let (mut params, mut quality) = (Vec::new(), 1.0);
        for part in parts {
            let Some((name, value)) = part.split_once('=') else { continue };
            let (name, value) = (name.trim(), value.trim().trim_matches('"'));
            match name {
                "q" => quality = value.parse().unwrap_or(1.0),
                _ => params.push((name, value)),
            }
        }
        Some(Self { kind: kind.trim(), subtype: subtype.trim(), params, quality })
    }

    fn param(&self, name: &str) -> &str {
        self.params.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value)
    }

    /// The form it asks for; `None` where nobody serves it.
    fn form(&self, is_list: bool) -> Option<Form> {
        let known = |subtype| matches!(subtype, "json" | "yaml" | "vnd.kubernetes.protobuf" | "cbor");
        match (self.kind, self.subtype) {
            ("application", "json" | "*") | ("*", "*") => {}
            ("application", subtype) if known(subtype) => return Some(Form::Other),
            _ => return None,
        }
        let converts = ["as", "g", "v"].iter().any(|name| !self.param(name).is_empty());
        let stream = self.param("stream");
        if !matches!(stream, "" | "watch") || !self.param("sv").is_empty() {
            return None;
        }
        if self.param("pretty") == "1" {
            return Some(Form::Other);
        }
        match (self.param("as"), self.param("g"), self.param("v")) {
            _ if !converts => Some(Form::Json),
            ("PartialObjectMetadataList", "meta.k8s.io", "v1") if is_list => Some(Form::PartialJson),
            ("PartialObjectMetadata", "meta.k8s.io", "v1") if !is_list => Some(Form::PartialJson),
            // Tables, other versions, and what only upstream can refuse.
            _ => Some(Form::Other),
        }
    }
}

/// The form that an `Accept` header asks for.
pub fn negotiate(header: &str, is_list: bool) -> Form {
    if header.is_empty() {
        return Form::Json;
    }
    let mut clauses: Vec<_> = header.split(',').filter_map(|text| Clause::parse(text.trim())).collect();
    let specific = |clause: &Clause<'_>| (clause.kind != "*", clause.subtype != "*");
    clauses.sort_by(|a, b| b.quality.total_cmp(&a.quality).then(specific(b).cmp(&specific(a))));
    clauses.iter().find_map(|clause| clause.form(is_list)).unwrap_or(Form::Other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_clause_that_can_be_served_decides() {
        let partial = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        let partial_list = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
        for (header, is_list, form) in [
            ("", true, Form::Json),
            ("*/*", true, Form::Json),
            ("application/*", false, Form::Json),
            ("application/json, */*", true, Form::Json),
            ("application/json;stream=watch", false, Form::Json),
            ("text/html, application/json;q=0.5", true, Form::Json),
            ("application/yaml, application/json;q=0.9", true, Form::Other),
            ("application/yaml;q=0.1, application/json;q=0.9", true, Form::Json),
            ("application/vnd.kubernetes.protobuf,application/json", true, Form::Other),
            (partial, false, Form::PartialJson),
            (partial_list, true, Form::PartialJson),
            (partial, true, Form::Other),
            (table, true, Form::Other),
            ("application/json;pretty=1", true, Form::Other),
            ("text/html", true, Form::Other),
            (",;=,//", true, Form::Other),
        ] {
            assert_eq!(negotiate(header, is_list), form, "{header}");
        }
    }
}
