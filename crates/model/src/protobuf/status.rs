//! `metav1.Status` in protobuf: the body of failed requests, and the object of ERROR events.

use bytes::Bytes;
use prost::Message;

use super::{Malformed, enveloped, is_enveloped, open};

/// `metav1.Status`, without its list metadata, which is always empty.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Status {
    /// `Success` or `Failure`.
    #[prost(string, tag = "2")]
    pub status: String,
    /// For people.
    #[prost(string, tag = "3")]
    pub message: String,
    /// Machine-readable, such as `Expired`.
    #[prost(string, tag = "4")]
    pub reason: String,
    /// Details, depending on the reason.
    #[prost(message, optional, tag = "5")]
    pub details: Option<StatusDetails>,
    /// The HTTP status code.
    #[prost(int32, tag = "6")]
    pub code: i32,
}

/// `metav1.StatusDetails`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusDetails {
    /// The name of the object.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The group of the object.
    #[prost(string, tag = "2")]
    pub group: String,
    /// The kind or the resource of the object.
    #[prost(string, tag = "3")]
    pub kind: String,
    /// The causes, if there are several.
    #[prost(message, repeated, tag = "4")]
    pub causes: Vec<StatusCause>,
    /// How many seconds to wait before a retry.
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
    /// For people.
    #[prost(string, tag = "2")]
    pub message: String,
    /// The field that caused it.
    #[prost(string, tag = "3")]
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
        };
        assert_eq!(Status::read(&status.to_bytes()), Some(status.clone()));
        assert_eq!(Status::read(&enveloped("v1", "Pod", &status.encode_to_vec())), None);
        assert_eq!(Status::read(br#"{"kind":"Status"}"#), None);
        assert_eq!(Status::read(b"k8s\0\xff"), None);
    }
}
