//! The user that a certificate names (`CommonNameUserConversion` in
//! `apiserver/pkg/authentication/request/x509`).
//!
//! The hazard is a subject that two programs read differently: with several common names, one of
//! them would be the user here and another at the apiserver. So it is read as Go reads it.

use std::fmt::Write;

use ring::digest::{SHA256, digest};
use rustls::pki_types::CertificateDer;
use x509_parser::{
    asn1_rs::{Any, Oid, Tag, oid},
    oid_registry::{OID_X509_COMMON_NAME, OID_X509_ORGANIZATION_NAME},
    x509::AttributeTypeAndValue,
};

use super::bundle;
use crate::user::Identity;

/// The attribute of a subject with the uid of a user.
const UID: Oid<'static> = oid!(1.3.6.1.4.1.57683.2);
/// The extra that names the credential.
const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";

/// The reason why a subject names no user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoUser {
    /// The subject has no common name. The apiserver then tries other ways to authenticate the
    /// request.
    Nameless,
    /// The subject cannot be read, or its uid is no uid. The apiserver refuses such a request.
    Unusable,
}

/// The user that a certificate names, which a CA must have signed.
///
/// # Errors
/// The reason why the subject names no user.
pub fn holder(der: &CertificateDer<'_>) -> Result<Identity, NoUser> {
    let certificate = bundle::read(der).ok_or(NoUser::Unusable)?;
    let mut identity = user_of(certificate.subject().iter_attributes())?.authenticated();
    identity.extra.insert(CREDENTIAL_ID.to_owned(), vec![credential_id(der)]);
    Ok(identity)
}

fn user_of<'a>(attributes: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>) -> Result<Identity, NoUser> {
    let mut user = String::new();
    let mut groups = Vec::new();
    let mut uids = Vec::new();
    for attribute in attributes {
        let value = text(attribute.attr_value()).ok_or(NoUser::Unusable)?;
        match attribute.attr_type() {
            // The last one counts.
            name if *name == OID_X509_COMMON_NAME => user = value,
            name if *name == OID_X509_ORGANIZATION_NAME => groups.push(value),
            name if *name == UID => uids.push(value),
            _ => {}
        }
    }
    if user.is_empty() {
        return Err(NoUser::Nameless);
    }
    let uid = match (uids.pop(), uids.is_empty()) {
        (None, _) => String::new(),
        (Some(uid), true) if !uid.is_empty() => uid,
        _ => return Err(NoUser::Unusable),
    };
    Ok(Identity { user, uid, groups, ..Identity::default() })
}

fn credential_id(der: &[u8]) -> String {
    digest(&SHA256, der).as_ref().iter().fold("X509SHA256=".to_owned(), |mut id, byte| {
        let _ = write!(id, "{byte:02x}");
        id
    })
}

/// The text of an attribute (`parseASN1String` in Go's `x509`). `None` if it is none.
fn text(value: &Any<'_>) -> Option<String> {
    let bytes = value.data;
    let ascii = |is_in: fn(u8) -> bool| bytes.iter().all(|byte| is_in(*byte)).then(|| String::from_utf8_lossy(bytes));
    let text = match value.tag() {
        Tag::Utf8String => return String::from_utf8(bytes.to_vec()).ok(),
        // Taken for Latin-1.
        Tag::T61String => return Some(bytes.iter().map(|byte| char::from(*byte)).collect()),
        Tag::BmpString => return two_byte_text(bytes),
        Tag::PrintableString => ascii(is_printable),
        Tag::Ia5String => ascii(|byte| byte.is_ascii()),
        Tag::NumericString => ascii(|byte| byte.is_ascii_digit() || byte == b' '),
        _ => None,
    };
    text.map(Into::into)
}

fn is_printable(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b" '()+,-./:=?*&".contains(&byte)
}

/// Decodes text with two bytes for each character; there are no pairs of surrogates.
fn two_byte_text(bytes: &[u8]) -> Option<String> {
    let bytes = bytes.strip_suffix(&[0, 0]).unwrap_or(bytes);
    let (pairs, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    let character = |pair: &[u8; 2]| match u16::from_be_bytes(*pair) {
        // Reserved code points that are no characters.
        0xfdd0..=0xfdef | 0xfffe | 0xffff => None,
        point => char::from_u32(point.into()),
    };
    pairs.iter().map(character).collect()
}

#[cfg(test)]
mod tests;
