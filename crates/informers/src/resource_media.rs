//! A resource to cache from the start, as the operator names it: `pods`, `pods=protobuf` or
//! `pods=json+protobuf`.

use kubefan_model::Media;

/// A resource to cache from the start, and the media to cache it in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredResource {
    /// Name of the resource, any that kubectl accepts. It is not checked here.
    pub name: String,
    /// JSON, protobuf or both; never empty.
    pub media: Vec<Media>,
}

/// The media that can be configured. Tables depend on the request of a reader.
pub(super) const CONFIGURABLE: [Media; 2] = [Media::Json, Media::Protobuf];

impl ConfiguredResource {
    /// Reads a name, optionally followed by `=` and media with `+` between them.
    ///
    /// # Errors
    /// The part that names no medium, or one that was named before.
    pub fn parse(text: &str) -> Result<Self, &str> {
        let Some((name, listed)) = text.split_once('=') else { return Ok(text.into()) };
        let mut media = Vec::new();
        for part in listed.split('+') {
            let known = CONFIGURABLE.into_iter().find(|known| known.as_str() == part && !media.contains(known));
            media.push(known.ok_or(part)?);
        }
        Ok(Self { name: name.to_owned(), media })
    }
}

/// A resource that is cached as JSON.
impl From<&str> for ConfiguredResource {
    fn from(name: &str) -> Self {
        Self { name: name.to_owned(), media: vec![Media::Json] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_follow_the_name_and_json_is_the_default() {
        let parsed = |text| ConfiguredResource::parse(text).map(|resource| (resource.name, resource.media));
        assert_eq!(parsed("pods"), Ok(("pods".to_owned(), vec![Media::Json])));
        assert_eq!(parsed("pods=json"), parsed("pods"));
        assert_eq!(parsed("pods=protobuf"), Ok(("pods".to_owned(), vec![Media::Protobuf])));
        let both = vec![Media::Json, Media::Protobuf];
        assert_eq!(parsed("deployments.apps=json+protobuf"), Ok(("deployments.apps".to_owned(), both)));
        for (text, wrong) in [
            ("pods=", ""),
            ("pods=xml", "xml"),
            ("pods=json+", ""),
            ("pods=json+json", "json"),
            ("pods=table", "table"),
        ] {
            assert_eq!(parsed(text), Err(wrong), "{text}");
        }
    }
}
