//! Content negotiation: the form of the objects in a response
//! (`negotiation.NegotiateMediaTypeOptions` in the apiserver).
//!
//! The first clause of `Accept` that the apiserver could serve decides. If kubefan can make that
//! form, the cache answers; otherwise upstream does, also with a 406, because that lists the media
//! types. The hazard: in the apiserver two libraries parse the header one after the other, each in
//! its own way. Any third way would answer requests that the apiserver refuses, so both are copied
//! here.

use http::{HeaderMap, header};
use kubefan_model::{
    Media,
    format::{Format, IncludeObject},
    projection::Projection,
};

use super::{query::Query, status::Failure};

/// The form of the objects in a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Whole objects.
    Whole(Media),
    /// Metadata of the objects, as PartialObjectMetadata.
    Partial(Media),
    /// Rows of a Table, in JSON.
    Table,
    /// A form that kubefan cannot make.
    Other,
}

/// The request of one clause of an `Accept` header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// The form.
    pub form: Form,
    /// Whether managed fields are left out.
    pub drops_managed_fields: bool,
}

impl Asked {
    /// Returns the format that makes it, if kubefan can. `include` is the part of its object in
    /// each row of a Table; `None` if that is invalid.
    pub fn format(self, include: Option<IncludeObject>) -> Option<Format> {
        let projection = |projection: Projection| {
            if self.drops_managed_fields { projection.without_managed_fields() } else { projection }
        };
        match self.form {
            Form::Whole(media) => Some(Format::http(media, projection(Projection::default()))),
            Form::Partial(media) => Some(Format::http(media, projection(Projection::partial_object_metadata()))),
            // Rows are cached as the apiserver makes them.
            Form::Table if self.drops_managed_fields => None,
            Form::Table => include.map(Format::table),
            Form::Other => None,
        }
    }

    /// Whether it is JSON.
    pub fn is_json(self) -> bool {
        matches!(self.form, Form::Whole(Media::Json) | Form::Partial(Media::Json) | Form::Table)
    }
}

impl From<Form> for Asked {
    fn from(form: Form) -> Self {
        Self { form, drops_managed_fields: false }
    }
}

/// The only field that `drop` can name (KEP-5958). Any other value makes a clause one that the
/// apiserver does not serve.
const MANAGED_FIELDS: &str = "metadata.managedFields";

/// The most clauses: Go's `sort.Sort` sorts up to 12 elements by insertion, which is copied here.
const CLAUSES_MAX: usize = 12;

/// A media type with its parameters.
struct Clause<'a> {
    kind: &'a str,
    subtype: &'a str,
    params: Vec<(&'a str, &'a str)>,
    quality: f32,
}

impl<'a> Clause<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (media, mut rest) = text.split_once(';').unwrap_or((text, ""));
        let (kind, subtype) = match media.split_once('/') {
            Some((kind, subtype)) if !subtype.is_empty() => (kind, subtype),
            _ if media.trim_end_matches('/').trim_matches(' ') == "*" => ("*", "*"),
            _ => return None,
        };
        if subtype.contains('/') {
            return None;
        }
        let mut params = Vec::new();
        let mut quality = 1.0;
        while !rest.is_empty() {
            let part;
            (part, rest) = rest.split_once(';').unwrap_or((rest, ""));
            let Some((name, value)) = part.split_once('=').filter(|(_, value)| !value.is_empty()) else { continue };
            if value.contains('=') {
                continue;
            }
            match name.trim_matches(' ') {
                // An invalid number counts as zero.
                "q" => quality = value.parse().unwrap_or_default(),
                name => params.push((name, value.trim_matches(' '))),
            }
        }
        Some(Self { kind: kind.trim_matches(' '), subtype: subtype.trim_matches(' '), params, quality })
    }

    /// Whether it sorts before another clause. This is not a consistent order: a specific type
    /// sorts before a wildcard whatever their qualities.
    fn is_before(&self, other: &Self) -> bool {
        self.quality > other.quality
            || (self.kind != "*" && other.kind == "*")
            || (self.subtype != "*" && other.subtype == "*")
    }

    fn param(&self, name: &str) -> &str {
        self.params.iter().rev().find(|(known, _)| *known == name).map_or("", |(_, value)| value)
    }

    /// Whether it asks for the objects as another kind.
    fn converts(&self) -> bool {
        ["as", "g", "v"].iter().any(|name| !self.param(name).is_empty())
    }

    /// Returns the form that it asks for; `None` if the apiserver serves no such form.
    fn form(&self, is_list: bool) -> Option<Form> {
        let media = match (self.kind, self.subtype) {
            ("application", "json" | "*") | ("*", "*") => Media::Json,
            ("application", "vnd.kubernetes.protobuf") => Media::Protobuf,
            ("application", "yaml" | "cbor") => return Some(Form::Other),
            _ => return None,
        };
        let stream = self.param("stream");
        if !matches!(stream, "" | "watch") || !matches!(self.param("sv"), "" | "v1") {
            return None;
        }
        if self.param("pretty") == "1" {
            return Some(Form::Other);
        }
        match (self.param("as"), self.param("g"), self.param("v")) {
            _ if !self.converts() => Some(Form::Whole(media)),
            ("PartialObjectMetadataList", "meta.k8s.io", "v1") if is_list => Some(Form::Partial(media)),
            ("PartialObjectMetadata", "meta.k8s.io", "v1") if !is_list => Some(Form::Partial(media)),
            ("Table", "meta.k8s.io", "v1") if media == Media::Json => Some(Form::Table),
            // Other versions, and forms that upstream refuses.
            _ => Some(Form::Other),
        }
    }
}

/// Whether the apiserver's router accepts the header for JSON or protobuf (`Route.matchesAccept` of
/// go-restful).
fn is_routed(header: &str) -> bool {
    let known = [Media::Json.content_type(), Media::Protobuf.content_type(), "*/*"];
    header.split(',').any(|clause| clause.split(';').next().is_some_and(|media| known.contains(&media.trim())))
}

/// Returns the requests of an `Accept` header, in the order in which the apiserver considers them.
/// `reads_drop`: whether the parameter `drop` has a meaning; otherwise it is ignored, as any
/// unknown one.
pub fn negotiate(header: &str, is_list: bool, reads_drop: bool) -> Vec<Asked> {
    if header.is_empty() {
        return vec![Form::Whole(Media::Json).into()];
    }
    let asked = |clause: &Clause<'_>| {
        let drop = if reads_drop { clause.param("drop") } else { "" };
        let form = clause.form(is_list).filter(|_| matches!(drop, "" | MANAGED_FIELDS))?;
        Some(Asked { form, drops_managed_fields: !drop.is_empty() })
    };
    clauses(header).iter().filter_map(asked).collect()
}

/// Whether an `Accept` header accepts only objects without the fields of its parameter `drop`, so
/// that a server that ignores `drop` could not answer.
pub fn insists_on_drop(header: &str, is_list: bool) -> bool {
    match &*negotiate(header, is_list, true) {
        // Another media type, or a field that cannot be dropped.
        [] => header.contains("drop="),
        asked => asked.iter().all(|asked| asked.drops_managed_fields),
    }
}

/// Returns the clauses in the order in which the apiserver considers them; none if it refuses the
/// header.
fn clauses(header: &str) -> Vec<Clause<'_>> {
    if !is_routed(header) {
        return Vec::new();
    }
    let mut clauses: Vec<_> =
        header.split(',').filter_map(|text| Clause::parse(text.trim_matches(' '))).take(CLAUSES_MAX + 1).collect();
    if clauses.len() > CLAUSES_MAX {
        return Vec::new();
    }
    // Insertion sort: without a consistent order, the result depends on the algorithm.
    for end in 1..clauses.len() {
        let mut at = end;
        while at > 0 && clauses[at].is_before(&clauses[at - 1]) {
            clauses.swap(at, at - 1);
            at -= 1;
        }
    }
    clauses
}

/// Returns the encoding of a `Status`, which no clause converts (`responsewriters.ErrorNegotiated`
/// with `DefaultEndpointRestrictions`); `None` if it is one that kubefan cannot make. The same
/// holds for the indented JSON that the apiserver falls back to if every clause converts.
pub fn negotiate_failure(header: Option<&str>) -> Option<Media> {
    let clauses = clauses(header.unwrap_or_default());
    if clauses.is_empty() {
        return Some(Media::Json);
    }
    let forms = clauses.iter().filter(|clause| !clause.converts()).find_map(|clause| match clause.form(false)? {
        Form::Whole(media) => Some(Some(media)),
        Form::Other if clause.subtype == "json" => Some(Some(Media::Json)),
        Form::Other => Some(None),
        Form::Partial(_) | Form::Table => None,
    });
    forms.flatten()
}

/// Returns the `Accept` header; empty if there is none, `None` if it is not visible ASCII.
pub fn accept_header(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::ACCEPT).map_or(Some(""), |value| value.to_str().ok())
}

/// Whether the JSON is indented for people (`isPrettyPrint` in the apiserver's `negotiate.go`).
pub fn is_pretty(headers: &HeaderMap, query: &Query<'_>) -> bool {
    if let Some(value) = query.first("pretty").filter(|value| !value.is_empty()) {
        return matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True");
    }
    let agent = headers.get(header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    ["curl", "Wget", "Mozilla/5.0"].iter().any(|people| agent.starts_with(people))
}

/// 406, for a form that the cache cannot make.
pub fn not_acceptable() -> Failure {
    Failure::not_acceptable(
        "the cache serves only JSON and protobuf, whole objects or PartialObjectMetadata, and tables".to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_clause_that_can_be_served_decides() {
        let partial = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        let partial_list = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        let protobuf = "application/vnd.kubernetes.protobuf";
        let metadata = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
        for (header, is_list, form) in [
            ("", true, Form::Whole(Media::Json)),
            ("*/*", true, Form::Whole(Media::Json)),
            ("application/*", false, Form::Other),
            ("*", true, Form::Other),
            ("application/yaml;q=0.1, */*", true, Form::Whole(Media::Json)),
            ("*/*, application/yaml;q=0.1", true, Form::Other),
            ("application/json;q=high", true, Form::Whole(Media::Json)),
            ("application/json;as=a=b", true, Form::Whole(Media::Json)),
            ("application/json;v=v1", true, Form::Other),
            ("application/json, */*", true, Form::Whole(Media::Json)),
            ("application/json;stream=watch", false, Form::Whole(Media::Json)),
            ("application/json;sv=v1,application/vnd.kubernetes.protobuf", true, Form::Whole(Media::Json)),
            ("application/json;sv=v2,application/vnd.kubernetes.protobuf", true, Form::Whole(Media::Protobuf)),
            ("text/html, application/json;q=0.5", true, Form::Whole(Media::Json)),
            ("application/yaml, application/json;q=0.9", true, Form::Other),
            ("application/yaml;q=0.1, application/json;q=0.9", true, Form::Whole(Media::Json)),
            ("application/vnd.kubernetes.protobuf,application/json", true, Form::Whole(Media::Protobuf)),
            (protobuf, false, Form::Whole(Media::Protobuf)),
            ("application/vnd.kubernetes.protobuf;stream=watch", false, Form::Whole(Media::Protobuf)),
            (metadata, false, Form::Partial(Media::Protobuf)),
            ("application/vnd.kubernetes.protobuf;as=Table;g=meta.k8s.io;v=v1", true, Form::Other),
            (partial, false, Form::Partial(Media::Json)),
            (partial_list, true, Form::Partial(Media::Json)),
            (partial, true, Form::Other),
            (table, true, Form::Table),
            ("application/json;as=Table;v=v1beta1;g=meta.k8s.io", true, Form::Other),
            ("application/json;pretty=1", true, Form::Other),
            ("text/html", true, Form::Other),
            (",;=,//", true, Form::Other),
        ] {
            let asked = negotiate(header, is_list, false).first().copied();
            assert_eq!(asked.unwrap_or(Form::Other.into()), form.into(), "{header}");
        }
    }

    #[test]
    fn managed_fields_are_dropped_where_a_clause_says_so_and_an_unknown_field_disables_its_clause() {
        let json = "application/json";
        let protobuf = "application/vnd.kubernetes.protobuf";
        let drop = "drop=metadata.managedFields";
        let whole = |media, drops_managed_fields| Asked { form: Form::Whole(media), drops_managed_fields };
        let json_form = whole(Media::Json, false);
        let protobuf_form = whole(Media::Protobuf, false);
        for (header, expected) in [
            (format!("{json};{drop}"), vec![whole(Media::Json, true)]),
            (format!("{json}; {drop} ,*/*; {drop}"), vec![whole(Media::Json, true); 2]),
            (format!("{protobuf};{drop},{json}"), vec![whole(Media::Protobuf, true), json_form]),
            (format!("{json};drop=,{protobuf}"), vec![json_form, protobuf_form]),
            (format!("{json};drop=spec,{protobuf}"), vec![protobuf_form]),
            (format!("{json};drop=metadata.managedFields+spec"), vec![]),
            (format!("{json};drop=metadata.managedFields+metadata.managedFields"), vec![]),
            (
                format!("{json};as=Table;v=v1;g=meta.k8s.io;{drop}"),
                vec![Asked { form: Form::Table, drops_managed_fields: true }],
            ),
        ] {
            assert_eq!(negotiate(&header, true, true), expected, "{header}");
            let ignored = negotiate(&header, true, false);
            assert!(!ignored.is_empty() && ignored.iter().all(|asked| !asked.drops_managed_fields), "{header}");
        }
        for (header, insists) in [
            (format!("{json};{drop}"), true),
            (format!("{json};{drop},*/*"), false),
            (format!("{json};drop=spec"), true),
            (format!("application/yaml;{drop}"), true),
            ("application/yaml".to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(insists_on_drop(&header, false), insists, "{header}");
        }
        let table = Asked { form: Form::Table, drops_managed_fields: true };
        assert_eq!(table.format(Some(IncludeObject::default())), None);
    }

    #[test]
    fn a_failure_has_the_first_encoding_that_is_not_of_another_form() {
        let metadata = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        for (header, media) in [
            (None, Media::Json),
            (Some("text/html"), Media::Json),
            (Some("application/vnd.kubernetes.protobuf,application/json"), Media::Protobuf),
            (Some("application/json,application/vnd.kubernetes.protobuf"), Media::Json),
            (Some(&*format!("{metadata},application/json")), Media::Json),
        ] {
            assert_eq!(negotiate_failure(header), Some(media), "{header:?}");
        }
    }

    #[test]
    fn upstream_makes_a_failure_in_yaml_or_of_a_form_that_no_failure_has() {
        let partial = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        let yaml = [format!("{partial},application/yaml;q=0"), format!("application/yaml;q=abc,{partial}")];
        for header in yaml.iter().map(String::as_str).chain([partial]) {
            assert_eq!(negotiate_failure(Some(header)), None, "{header}");
            assert_eq!(negotiate(header, false, false)[0], Form::Partial(Media::Json).into(), "{header}");
        }
    }
}
