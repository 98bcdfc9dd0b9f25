//! `metav1.Status` in protobuf: the body of failed requests, and the object of ERROR events.
//!
//! The apiserver writes every field, also an empty one, except absent messages (proto2's `required`
//! in prost's words), so that its answers and kubefan's are equal byte by byte.

use bytes::Bytes;
use prost::Message;

use super::{Malformed, enveloped, is_enveloped, open};

/// `metav1.Status`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Status {
    /// List metadata. In a failed request it only has a continue token.
    #[prost(message, required, tag = "1")]
    pub metadata: StatusMeta,
    /// `Success` or `Failure`.
    #[prost(string, required, tag = "2")]
    pub status: String,
    /// For people.
    #[prost(string, required, tag = "3")]
    pub message: String,
    /// Machine-readable, such as `Expired`.
    #[prost(string, required, tag = "4")]
    pub reason: String,
    /// Details, depending on the reason.
    #[prost(message, optional, tag = "5")]
    pub details: Option<StatusDetails>,
    /// The HTTP status code.
    #[prost(int32, required, tag = "6")]
    pub code: i32,
}

/// `metav1.ListMeta` of a Status.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusMeta {
    /// Deprecated, always empty.
    #[prost(string, required, tag = "1")]
    pub self_link: String,
    /// Always empty.
    #[prost(string, required, tag = "2")]
    pub resource_version: String,
    /// A token to continue a list whose own token has expired.
    #[prost(string, required, tag = "3")]
    pub continues: String,
}

/// `metav1.StatusDetails`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusDetails {
    /// The name of the object.
    #[prost(string, required, tag = "1")]
    pub name: String,
    /// The group of the object.
    #[prost(string, required, tag = "2")]
    pub group: String,
    /// The kind or the resource of the object.
    #[prost(string, required, tag = "3")]
    pub kind: String,
    /// The causes, if there are several.
    #[prost(message, repeated, tag = "4")]
    pub causes: Vec<StatusCause>,
    /// Seconds to wait before a retry.
    #[prost(int32, required, tag = "5")]
    pub retry_after_seconds: i32,
    /// The uid of the object.
    #[prost(string, required, tag = "6")]
    pub uid: String,
}

/// `metav1.StatusCause`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusCause {
    /// Machine-readable, such as `ResourceVersionTooLarge`.
    #[prost(string, required, tag = "1")]
    pub reason: String,
    /// For people.
    #[prost(string, required, tag = "2")]
    pub message: String,
    /// The field that caused it.
    #[prost(string, required, tag = "3")]
    pub field: String,
}

impl Status {
    /// The Status in its envelope.
    pub fn to_bytes(&self) -> Bytes {
        enveloped("v1", "Status", &self.encode_to_vec())
    }

    /// Parses a Status. `None` if the bytes are something else.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let envelope = is_enveloped(bytes).then(|| open(bytes)).and_then(Result::<_, Malformed>::ok)?;
        (envelope.kind == "Status").then(|| Self::decode(envelope.message).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes are those of a kube-apiserver 1.35 for a watch of pods from version 1.
    #[test]
    fn empty_fields_are_written_as_the_apiserver_writes_them() {
        let status = Status {
            status: "Failure".into(),
            message: "m".into(),
            reason: "Expired".into(),
            code: 410,
            ..Status::default()
        };
        let meta = b"\x0a\x06\x0a\x00\x12\x00\x1a\x00";
        let rest = b"\x12\x07Failure\x1a\x01m\x22\x07Expired\x30\x9a\x03";
        assert_eq!(status.encode_to_vec(), [&meta[..], rest].concat());
        let details = StatusDetails { causes: vec![StatusCause::default()], ..StatusDetails::default() };
        let cause = b"\x22\x06\x0a\x00\x12\x00\x1a\x00";
        assert_eq!(details.encode_to_vec(), [b"\x0a\x00\x12\x00\x1a\x00", &cause[..], b"\x28\x00\x32\x00"].concat());
    }

    #[test]
    fn a_status_parses_back_and_other_bytes_do_not() {
        let cause = StatusCause { reason: "R".into(), message: "m".into(), field: String::new() };
        let details = StatusDetails { causes: vec![cause], retry_after_seconds: 3, ..StatusDetails::default() };
        let status = Status {
            status: "Failure".into(),
            message: "too old".into(),
            reason: "Expired".into(),
            details: Some(details),
            code: 410,
            ..Status::default()
        };
        assert_eq!(Status::read(&status.to_bytes()), Some(status.clone()));
        assert_eq!(Status::read(&enveloped("v1", "Pod", &status.encode_to_vec())), None);
        assert_eq!(Status::read(br#"{"kind":"Status"}"#), None);
        assert_eq!(Status::read(b"k8s\0\xff"), None);
    }
}
