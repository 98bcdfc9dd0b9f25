//! How objects are written: the encodings that kubefan reads from upstream and keeps, each in a cache of its own.
//!
//! A cache holds the bytes that its clients get, so what JSON and protobuf clients share is the apiserver, not the memory.

/// An encoding of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Media {
    /// JSON, which every resource has.
    #[default]
    Json,
    /// Kubernetes' protobuf, which built-in types have: messages in an envelope that names their type.
    Protobuf,
    /// Rows of the apiserver's own Tables, each with its object: what kubectl prints, as JSON.
    Table,
}

impl Media {
    /// The name in metrics, logs and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Protobuf => "protobuf",
            Self::Table => "table",
        }
    }

    /// The media type of an object and of a list.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Protobuf => "application/vnd.kubernetes.protobuf",
            Self::Table => Self::Json.content_type(),
        }
    }

    /// What a request for an object or a list accepts.
    pub const fn accept(self) -> &'static str {
        match self {
            Self::Json | Self::Protobuf => self.content_type(),
            Self::Table => "application/json;as=Table;v=v1;g=meta.k8s.io",
        }
    }

    /// What a request for a watch accepts.
    pub const fn watch_accept(self) -> &'static str {
        match self {
            Self::Json | Self::Protobuf => self.watch_content_type(),
            Self::Table => self.accept(),
        }
    }

    /// What a request for it says in its query, beside the media type: that a row holds its whole object.
    pub const fn query(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Json | Self::Protobuf => None,
            Self::Table => Some(("includeObject", "Object")),
        }
    }

    /// The media type of a watch, as the apiserver names it in its answers.
    pub const fn watch_content_type(self) -> &'static str {
        match self {
            // Some servers and proxies know no parameters here, and need none.
            Self::Json => "application/json",
            Self::Protobuf => "application/vnd.kubernetes.protobuf;stream=watch",
            Self::Table => Self::Json.watch_content_type(),
        }
    }
}
