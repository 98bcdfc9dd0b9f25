//! The encodings that kubefan requests from upstream. Each has a cache of its own.
//!
//! A cache contains the bytes that its clients receive. So JSON and protobuf clients of one
//! resource share no memory.

/// An encoding of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Media {
    /// JSON, which every resource supports.
    #[default]
    Json,
    /// Kubernetes protobuf, which built-in types support: messages in an envelope that names their
    /// type.
    Protobuf,
    /// Rows of the apiserver's Tables as JSON, each with its whole object. kubectl prints them.
    Table,
}

impl Media {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Json, Self::Protobuf, Self::Table];

    /// The name in metrics, logs and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Protobuf => "protobuf",
            Self::Table => "table",
        }
    }

    /// The content type of an object and of a list.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Protobuf => "application/vnd.kubernetes.protobuf",
            Self::Table => Self::Json.content_type(),
        }
    }

    /// The `Accept` header of a request for an object or a list.
    pub const fn accept(self) -> &'static str {
        match self {
            Self::Json | Self::Protobuf => self.content_type(),
            Self::Table => "application/json;as=Table;v=v1;g=meta.k8s.io",
        }
    }

    /// The `Accept` header of a request for a watch.
    pub const fn watch_accept(self) -> &'static str {
        match self {
            Self::Json | Self::Protobuf => self.watch_content_type(),
            Self::Table => self.accept(),
        }
    }

    /// The query parameter that requests need besides the `Accept` header. For Tables it requests
    /// the whole object in each row.
    pub const fn query(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Json | Self::Protobuf => None,
            Self::Table => Some(("includeObject", "Object")),
        }
    }

    /// The content type of a watch, as the apiserver sends it.
    pub const fn watch_content_type(self) -> &'static str {
        match self {
            // Some servers and proxies do not accept a parameter here, and JSON needs none.
            Self::Json => "application/json",
            Self::Protobuf => "application/vnd.kubernetes.protobuf;stream=watch",
            Self::Table => Self::Json.watch_content_type(),
        }
    }
}
