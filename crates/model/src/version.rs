//! Resource versions. Only this file parses and compares them.
//!
//! A version is opaque on the wire. Since Kubernetes 1.35 the apiserver guarantees that versions of
//! one resource in one cluster compare as decimal numbers
//! (`k8s.io/apimachinery/pkg/util/resourceversion`, KEP-5504). There is no guarantee across
//! resources or clusters, and nothing here compares those.

use std::{cmp::Ordering, fmt, num::NonZeroU64, str::FromStr};

/// A place in the history of one resource in one cluster: a revision of etcd, never zero, and how
/// many events of that revision come before.
///
/// Nearly every revision has one event. A transaction of etcd may have several, of different keys:
/// objects that expire with one lease are deleted at one resource version. Every watch sends them
/// in the same order, so their places are counted, as etcd counts sub-revisions. A list and a
/// bookmark have all events of their revision, so they are at its end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceVersion {
    main: NonZeroU64,
    sub: u32,
}

/// The place at the end of a revision, in a text.
const END: &str = "end";

/// A text is not a resource version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid resource version {text:?}: expected a positive decimal number of at most {}, without leading zeros",
    u64::MAX
)]
pub struct InvalidVersion {
    text: String,
}

impl ResourceVersion {
    /// The version with this number. `None` for 0, which means "any version" in requests.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self::of)
    }

    fn of(main: NonZeroU64) -> Self {
        Self { main, sub: 0 }
    }

    /// The number, as the apiserver knows it.
    pub fn get(self) -> u64 {
        self.main.get()
    }

    /// The number of events of the same revision that come before.
    pub fn sub(self) -> u32 {
        self.sub
    }

    /// The version as the apiserver knows it, without a place inside it.
    pub fn whole(self) -> Self {
        Self::of(self.main)
    }

    /// The end of the same revision: after all of its events, however many there are. A list and a
    /// bookmark are there, and a client that knows no places resumes from there.
    pub fn end(self) -> Self {
        Self { sub: u32::MAX, ..self }
    }

    /// Whether it is the end of a revision.
    pub fn is_end(self) -> bool {
        self.sub == u32::MAX
    }

    /// The least place of a cache that may have everything up to here: it may have all events of a
    /// revision and not know that there are no more. Messages over gRPC name this one, and say
    /// beside it whether it is the end.
    pub fn least_reached(self) -> Self {
        if self.is_end() { self.whole() } else { self }
    }

    /// Whether several events of its revision come before, and more may follow.
    pub fn is_between_events(self) -> bool {
        self.sub > 0 && !self.is_end()
    }

    /// Whether both are of the same revision.
    pub fn is_at(self, other: Self) -> bool {
        self.main == other.main
    }

    /// The place of an event of the revision of `event`, after everything up to here. `None` if
    /// that revision is older, or has ended.
    pub fn followed_by(self, event: Self) -> Option<Self> {
        match event.main.cmp(&self.main) {
            Ordering::Less => None,
            Ordering::Equal => Some(Self { sub: self.sub.checked_add(1)?, ..self }),
            Ordering::Greater => Some(event.whole()),
        }
    }

    /// The version with the next lower number, even if nothing was written at it. `None` for 1.
    pub fn below(self) -> Option<Self> {
        Self::new(self.get() - 1)
    }

    /// The version with the next higher number, even if nothing was written at it.
    pub fn above(self) -> Self {
        Self { main: self.main.saturating_add(1), sub: 0 }
    }

    /// The place right before this one. `None` for the first of all.
    pub fn before(self) -> Option<Self> {
        match self.sub.checked_sub(1) {
            Some(sub) => Some(Self { sub, ..self }),
            None => self.below().map(Self::end),
        }
    }

    /// The version after which the apiserver sends everything after this place. It sends whole
    /// versions, so unless this one has ended, a part of it comes again.
    pub fn read_from(self) -> Self {
        if self.is_end() {
            return self.whole();
        }
        self.below().unwrap_or_else(|| self.whole())
    }

    /// Parses the version of a request. `None` if it is empty or `"0"`, which both mean "any
    /// version".
    pub fn parse_request(text: &str) -> Result<Option<Self>, InvalidVersion> {
        match text {
            "" | "0" => Ok(None),
            text => text.parse().map(Some),
        }
    }

    /// Parses the text of [`Display`](fmt::Display): a version, or one with a place inside it,
    /// which only kubefan knows (`218.1`, or `218.end`).
    pub fn parse_place(text: &str) -> Result<Self, InvalidVersion> {
        let Some((main, sub)) = text.split_once('.') else { return text.parse() };
        let main: Self = main.parse().map_err(|_| InvalidVersion::of(text))?;
        if sub == END {
            return Ok(main.end());
        }
        let place = number(sub).map(|sub| Self { sub, ..main });
        place.filter(|place| place.sub > 0 && !place.is_end()).ok_or_else(|| InvalidVersion::of(text))
    }
}

impl InvalidVersion {
    fn of(text: &str) -> Self {
        Self { text: text.chars().take(64).collect() }
    }
}

fn number<N: FromStr>(text: &str) -> Option<N> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
    digits.then(|| text.parse().ok()).flatten()
}

impl From<NonZeroU64> for ResourceVersion {
    fn from(main: NonZeroU64) -> Self {
        Self::of(main)
    }
}

impl From<ResourceVersion> for NonZeroU64 {
    /// The version without a place inside it.
    fn from(version: ResourceVersion) -> Self {
        version.main
    }
}

/// A version as the apiserver writes it.
impl FromStr for ResourceVersion {
    type Err = InvalidVersion;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        number(text).map(Self::of).ok_or_else(|| InvalidVersion::of(text))
    }
}

impl fmt::Display for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sub {
            0 => self.main.fmt(f),
            _ if self.is_end() => write!(f, "{}.{END}", self.main),
            sub => write!(f, "{}.{sub}", self.main),
        }
    }
}

impl fmt::Debug for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rv{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        let version = |text: &str| text.parse::<ResourceVersion>().unwrap();
        assert!(version("9") < version("10"));
        assert_eq!(version("10").to_string(), "10");
    }

    #[test]
    fn the_events_of_one_revision_have_places_in_it() {
        let version = |text: &str| ResourceVersion::parse_place(text).unwrap();
        let first = version("218");
        let second = version("218.1");
        assert_eq!(first.followed_by(first), Some(second));
        assert_eq!(second.followed_by(version("219")), Some(version("219")));
        assert_eq!(second.followed_by(version("217")), None);
        assert!(first < second && second < version("218.10") && version("218.10") < version("219"));
        assert_eq!((second.to_string(), second.whole(), second.get()), ("218.1".to_owned(), first, 218));
        let end = version("218.end");
        assert_eq!((end, end.to_string(), end.whole()), (first.end(), "218.end".to_owned(), first));
        assert!(version("218.4294967294") < end && end < version("219"));
        assert_eq!((end.followed_by(first), end.followed_by(version("219"))), (None, Some(version("219"))));
        assert_eq!((first.read_from(), second.read_from(), end.read_from()), (version("217"), version("217"), first));
        for text in ["218.", "218.0", "218.01", ".1", "218.1.1", "218.-1", "0.1", "218.4294967295", "218.END", "0.end"]
        {
            assert!(ResourceVersion::parse_place(text).is_err(), "{text}");
        }
        assert!("218.1".parse::<ResourceVersion>().is_err(), "the apiserver knows no places");
    }

    #[test]
    fn invalid_versions_are_refused_and_named() {
        for text in ["", "0", "01", "-1", "+1", "1 ", "abc", "1.0", "99999999999999999999999"] {
            let error = text.parse::<ResourceVersion>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
            assert!(error.to_string().contains("at most 18446744073709551615"), "{error}");
        }
        assert_eq!(ResourceVersion::parse_request("0"), Ok(None));
        assert_eq!(ResourceVersion::parse_request(""), Ok(None));
    }
}
