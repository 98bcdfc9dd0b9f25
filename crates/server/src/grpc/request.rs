//! Parses and validates the fields of gRPC requests. Every error names the field at fault.

use std::time::Duration;

use kubefan_cache::{OnExpired, OnLag, Refusal};
use kubefan_common::proto::v1alpha1::{self, GetRequest, ListRequest, ProjectionType, WatchRequest};
use kubefan_model::{
    ResourceVersion,
    format::{Encoding, Format},
    projection::{Parts, Projection},
};

/// Parses a resource version; `None` means any version.
pub fn version(text: &str) -> Result<Option<ResourceVersion>, Refusal> {
    let invalid = |error: kubefan_model::version::InvalidVersion| Refusal::Invalid {
        field: "resource_version",
        message: error.to_string(),
    };
    match text {
        "" | "0" => Ok(None),
        text => ResourceVersion::parse_place(text).map(Some).map_err(invalid),
    }
}

/// Returns the place where a watch continues; `None` for a snapshot.
pub fn place(request: &WatchRequest) -> Result<Option<ResourceVersion>, Refusal> {
    let version = version(&request.resource_version)?;
    let is_complete = request.version_is_complete.unwrap_or_default();
    Ok(version.map(|version| if is_complete { version.end() } else { version }))
}

/// Returns the maximum time of a watch; `None` for no limit.
pub fn timeout(seconds: i64) -> Result<Option<Duration>, Refusal> {
    match u64::try_from(seconds) {
        Ok(0) => Ok(None),
        Ok(seconds) => Ok(Some(Duration::from_secs(seconds.min(u64::from(u32::MAX))))),
        Err(_) => Err(Refusal::Invalid { field: "timeout_seconds", message: format!("{seconds} is negative") }),
    }
}

/// The time without events after which a bookmark is sent. The default is 60 s, the minimum 1 s,
/// the maximum 24 h.
pub fn bookmark_interval(interval: Option<prost_types::Duration>) -> Result<Duration, Refusal> {
    const DEFAULT: Duration = Duration::from_secs(60);
    const LEAST: Duration = Duration::from_secs(1);
    let Some(interval) = interval else { return Ok(DEFAULT) };
    let invalid = |message: String| Refusal::Invalid { field: "bookmark_interval", message };
    // Checked first, because the conversion overflows for the smallest values.
    if interval.seconds < 0 || interval.nanos < 0 {
        return Err(invalid("it is negative".to_owned()));
    }
    let interval = Duration::try_from(interval).map_err(|error| invalid(error.to_string()))?;
    if interval < LEAST {
        return Err(invalid(format!("{interval:?} is less than {LEAST:?}")));
    }
    Ok(interval.min(Duration::from_secs(24 * 3600)))
}

/// The format in which a watch sends objects.
pub fn watch_format(request: &WatchRequest) -> Result<Format, Refusal> {
    let asked = request.projection.as_ref();
    let encoding = encoding(request.encoding)?;
    let only_changes = asked.is_some_and(|asked| asked.only_changes);
    if encoding == Encoding::Protobuf && only_changes {
        return Err(not_in_protobuf("projection.only_changes"));
    }
    Format::new(projection(asked, encoding)?, only_changes, encoding)
        .map_err(|error| Refusal::Invalid { field: "projection.only_changes", message: error.to_string() })
}

/// Whether deltas may be sent from the start of the watch, because the client still has the objects
/// of the version that it resumes from.
pub fn state_kept(request: &WatchRequest) -> Result<bool, Refusal> {
    let invalid = |message: &str| Err(Refusal::Invalid { field: "state_kept", message: message.to_owned() });
    if !request.state_kept {
        return Ok(false);
    }
    if encoding(request.encoding)? != Encoding::ZstdDelta {
        return invalid("only allowed with deltas: set encoding to ENCODING_ZSTD_DELTA");
    }
    if version(&request.resource_version)?.is_none() {
        return invalid(
            "a watch that starts with a snapshot has no earlier state: set resource_version, or leave this out",
        );
    }
    Ok(true)
}

/// Returns the reactions if the subscriber lags, and if its version has expired.
pub fn policy(request: &WatchRequest) -> Result<(OnLag, OnExpired), Refusal> {
    let on_lag = match v1alpha1::OnLag::try_from(request.on_lag) {
        Ok(v1alpha1::OnLag::Unspecified | v1alpha1::OnLag::Expire) => OnLag::Expire,
        Ok(v1alpha1::OnLag::Conflate) => OnLag::Conflate,
        Err(_) => return Err(unknown("on_lag", request.on_lag)),
    };
    let on_expired = match v1alpha1::OnExpired::try_from(request.on_expired) {
        Ok(v1alpha1::OnExpired::Unspecified | v1alpha1::OnExpired::Fail) => OnExpired::Fail,
        Ok(v1alpha1::OnExpired::Restart) => OnExpired::Restart,
        Err(_) => return Err(unknown("on_expired", request.on_expired)),
    };
    Ok((on_lag, on_expired))
}

/// The format of the objects in a list. Options that only watches have are ignored.
pub fn list_format(request: &ListRequest) -> Result<Format, Refusal> {
    let encoding = encoding(request.encoding)?;
    if matches!(encoding, Encoding::Zstd | Encoding::ZstdDelta) {
        let message =
            "a list is not compressed: set it to ENCODING_JSON or ENCODING_PROTOBUF, or read the snapshot of a watch";
        return Err(Refusal::Invalid { field: "encoding", message: message.to_owned() });
    }
    read_format(request.projection.as_ref(), encoding)
}

/// The format of the object in a get: the same bytes as a watch with this encoding sends.
pub fn get_format(request: &GetRequest) -> Result<Format, Refusal> {
    read_format(request.projection.as_ref(), encoding(request.encoding)?)
}

fn read_format(asked: Option<&v1alpha1::Projection>, encoding: Encoding) -> Result<Format, Refusal> {
    Format::new(projection(asked, encoding)?, false, encoding)
        .map_err(|error| Refusal::Invalid { field: "projection", message: error.to_string() })
}

fn projection(asked: Option<&v1alpha1::Projection>, encoding: Encoding) -> Result<Projection, Refusal> {
    let Some(asked) = asked else { return Ok(Projection::default()) };
    let is_protobuf = encoding == Encoding::Protobuf;
    let parts = match ProjectionType::try_from(asked.r#type) {
        Ok(ProjectionType::Unspecified | ProjectionType::Full) => Parts::Full,
        Ok(ProjectionType::Metadata) => Parts::Metadata,
        Ok(ProjectionType::FieldMask) => Parts::Fields(&asked.paths),
        Err(_) => return Err(unknown("projection.type", asked.r#type)),
    };
    let invalid = |message: String| Refusal::Invalid { field: "projection.paths", message };
    if !asked.paths.is_empty() && !matches!(parts, Parts::Fields(_)) {
        return Err(invalid(
            "only allowed with a field mask: set projection.type to PROJECTION_TYPE_FIELD_MASK".to_owned(),
        ));
    }
    match parts {
        Parts::Fields(_) if is_protobuf => Err(not_in_protobuf("projection.type")),
        _ if is_protobuf && asked.drop_managed_fields => Err(not_in_protobuf("projection.drop_managed_fields")),
        _ if is_protobuf && asked.drop_last_applied => Err(not_in_protobuf("projection.drop_last_applied")),
        // As the apiserver sends it: kubefan's own form of the metadata leaves out the version.
        Parts::Metadata if is_protobuf => Ok(Projection::partial_object_metadata()),
        parts => Projection::new(parts, asked.drop_managed_fields, asked.drop_last_applied)
            .map_err(|error| invalid(error.to_string())),
    }
}

/// The refusal of a projection that is made from JSON.
fn not_in_protobuf(field: &'static str) -> Refusal {
    let message = "with ENCODING_PROTOBUF objects are sent whole or as PROJECTION_TYPE_METADATA, as the apiserver made \
                   them: leave this out, or set encoding to ENCODING_JSON or ENCODING_ZSTD";
    Refusal::Invalid { field, message: message.to_owned() }
}

fn encoding(number: i32) -> Result<Encoding, Refusal> {
    match v1alpha1::Encoding::try_from(number) {
        Ok(v1alpha1::Encoding::Unspecified | v1alpha1::Encoding::Json) => Ok(Encoding::Json),
        Ok(v1alpha1::Encoding::Zstd) => Ok(Encoding::Zstd),
        Ok(v1alpha1::Encoding::ZstdDelta) => Ok(Encoding::ZstdDelta),
        Ok(v1alpha1::Encoding::Protobuf) => Ok(Encoding::Protobuf),
        Err(_) => Err(unknown("encoding", number)),
    }
}

fn unknown(field: &'static str, number: i32) -> Refusal {
    Refusal::Invalid { field, message: format!("{number} is not known to this version of kubefan") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(asked: v1alpha1::Projection) -> WatchRequest {
        WatchRequest { projection: Some(asked), ..WatchRequest::default() }
    }

    fn refused<T: std::fmt::Debug>(result: Result<T, Refusal>) -> &'static str {
        match result {
            Err(Refusal::Invalid { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_default_format_is_the_full_object_as_json() {
        assert_eq!(watch_format(&WatchRequest::default()), Ok(Format::default()));
        let full = v1alpha1::Projection { r#type: ProjectionType::Full.into(), ..Default::default() };
        let encoding = v1alpha1::Encoding::Json.into();
        assert_eq!(watch_format(&WatchRequest { encoding, ..asked(full) }), Ok(Format::default()));
        assert_eq!(get_format(&GetRequest::default()), Ok(Format::default()));
    }

    #[test]
    fn a_wrong_combination_is_refused_and_the_field_is_named() {
        let mask = ProjectionType::FieldMask.into();
        let paths = vec!["spec".to_owned()];
        let projections = [
            (v1alpha1::Projection { paths: paths.clone(), ..Default::default() }, "projection.paths"),
            (v1alpha1::Projection { r#type: mask, ..Default::default() }, "projection.paths"),
            (
                v1alpha1::Projection { r#type: mask, paths: vec!["a..b".into()], ..Default::default() },
                "projection.paths",
            ),
            (v1alpha1::Projection { r#type: 9, ..Default::default() }, "projection.type"),
            (v1alpha1::Projection { only_changes: true, ..Default::default() }, "projection.only_changes"),
        ];
        for (projection, field) in projections {
            assert_eq!(refused(watch_format(&asked(projection.clone()))), field);
            let list = list_format(&ListRequest { projection: Some(projection), ..Default::default() });
            assert_eq!(list.is_ok(), field == "projection.only_changes", "a list ignores only_changes");
        }
        assert_eq!(refused(watch_format(&WatchRequest { encoding: 9, ..Default::default() })), "encoding");
        assert_eq!(refused(get_format(&GetRequest { encoding: -1, ..Default::default() })), "encoding");
    }

    #[test]
    fn protobuf_is_served_whole_or_as_metadata_and_everything_else_is_refused_by_its_field() {
        let encoding = v1alpha1::Encoding::Protobuf.into();
        let formats = |projection: v1alpha1::Projection| {
            let projection = Some(projection);
            [
                watch_format(&WatchRequest { encoding, projection: projection.clone(), ..Default::default() }),
                list_format(&ListRequest { encoding, projection: projection.clone(), ..Default::default() }),
                get_format(&GetRequest { encoding, projection, ..Default::default() }),
            ]
        };
        let of = |kind: ProjectionType| v1alpha1::Projection { r#type: kind.into(), ..Default::default() };
        let whole = Format::new(Projection::default(), false, Encoding::Protobuf).unwrap();
        let partial = Format::new(Projection::partial_object_metadata(), false, Encoding::Protobuf).unwrap();
        for (asked, format) in [
            (of(ProjectionType::Unspecified), &whole),
            (of(ProjectionType::Full), &whole),
            (of(ProjectionType::Metadata), &partial),
        ] {
            for made in formats(asked) {
                assert_eq!(made.as_ref(), Ok(format));
            }
        }
        let paths = vec!["spec".to_owned()];
        for (asked, field) in [
            (v1alpha1::Projection { paths, ..of(ProjectionType::FieldMask) }, "projection.type"),
            (
                v1alpha1::Projection { drop_managed_fields: true, ..of(ProjectionType::Full) },
                "projection.drop_managed_fields",
            ),
            (
                v1alpha1::Projection { drop_last_applied: true, ..of(ProjectionType::Metadata) },
                "projection.drop_last_applied",
            ),
        ] {
            for made in formats(asked) {
                assert_eq!(refused(made), field);
            }
        }
        let only_changes = v1alpha1::Projection { only_changes: true, ..of(ProjectionType::Metadata) };
        let [watch, list, get] = formats(only_changes);
        assert_eq!(refused(watch), "projection.only_changes");
        assert_eq!((list.as_ref(), get.as_ref()), (Ok(&partial), Ok(&partial)), "only watches have this option");
    }

    #[test]
    fn a_list_is_not_compressed() {
        let list = |encoding: i32| list_format(&ListRequest { encoding, ..Default::default() });
        for encoding in [v1alpha1::Encoding::Unspecified, v1alpha1::Encoding::Json] {
            assert_eq!(list(encoding.into()), Ok(Format::default()));
        }
        for encoding in [v1alpha1::Encoding::Zstd.into(), v1alpha1::Encoding::ZstdDelta.into(), 9] {
            assert_eq!(refused(list(encoding)), "encoding");
        }
    }

    #[test]
    fn state_kept_needs_deltas_and_a_version() {
        let encoding = v1alpha1::Encoding::ZstdDelta.into();
        let kept = WatchRequest { state_kept: true, resource_version: "7".into(), encoding, ..Default::default() };
        assert_eq!(state_kept(&kept), Ok(true));
        assert_eq!(state_kept(&WatchRequest { state_kept: false, ..kept.clone() }), Ok(false));
        assert_eq!(refused(state_kept(&WatchRequest { encoding: 0, ..kept.clone() })), "state_kept");
        assert_eq!(refused(state_kept(&WatchRequest { resource_version: "0".into(), ..kept })), "state_kept");
    }
}
