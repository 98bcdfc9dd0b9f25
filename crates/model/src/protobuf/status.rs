//! `metav1.Status` in protobuf: what failed requests and ERROR events of a protobuf client carry.

use bytes::Bytes;
use prost::Message;

use super::{Malformed, enveloped, is_enveloped, open};

/// `metav1.Status`, without its list metadata, which is always empty.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Status {
    /// `Success` or `Failure`.
    #[prost(string, tag = "2")]
    pub status: String,
    /// For humans.
    #[prost(string, tag = "3")]
    pub message: String,
    /// Machine-readable, such as `Expired`.
    #[prost(string, tag = "4")]
    pub reason: String,
    /// More of it, by reason.
    #[prost(message, optional, tag = "5")]
    pub details: Option<StatusDetails>,
    /// The HTTP status.
    #[prost(int32, tag = "6")]
    pub code: i32,
}

/// `metav1.StatusDetails`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusDetails {
    /// The name of the object.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its group.
    #[prost(string, tag = "2")]
    pub group: String,
    /// Its kind, or its resource.
    #[prost(string, tag = "3")]
    pub kind: String,
    /// Why, in parts.
    #[prost(message, repeated, tag = "4")]
    pub causes: Vec<StatusCause>,
    /// What the apiserver asks to wait.
    #[prost(int32, tag = "5")]
    pub retry_after_seconds: i32,
    /// The uid of the object.
    #[prost(string, tag = "6")]
    pub uid: String,
}

/// `metav1.StatusCause`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusCause {
    /// Machine-readable, such as `ResourceVersionTooLarge`.
    #[prost(string, tag = "1")]
    pub reason: String,
    /// For humans.
    #[prost(string, tag = "2")]
    pub message: String,
    /// Which field it is about.
    #[prost(string, tag = "3")]
    pub field: String,
}

impl Status {
    /// In its envelope: the body of a failed request, and the object of an ERROR event.
    pub fn to_bytes(&self) -> Bytes {
        enveloped("v1", "Status", &self.encode_to_vec())
    }

    /// Reads a Status; `None` where the bytes are something else.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let opened = is_enveloped(bytes).then(|| open(bytes)).and_then(Result::<_, Malformed>::ok)?;
        (opened.kind == "Status").then(|| Self::decode(opened.message).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_as_it_was_written_and_nothing_else_is_one() {
        let cause = StatusCause { reason: "R".into(), message: "m".into(), field: String::new() };
        let details = StatusDetails { causes: vec![cause], retry_after_seconds: 3, ..StatusDetails::default() };
        let status = Status {
            status: "Failure".into(),
            message: "too old".into(),
            reason: "Expired".into(),
            details: Some(details),
            code: 410,
        };
        assert_eq!(Status::read(&status.to_bytes()), Some(status.clone()));
        assert_eq!(Status::read(&enveloped("v1", "Pod", &status.encode_to_vec())), None);
        assert_eq!(Status::read(br#"{"kind":"Status"}"#), None);
        assert_eq!(Status::read(b"k8s\0\xff"), None);
    }
}
