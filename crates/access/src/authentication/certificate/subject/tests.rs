//! A subject names the same user as in the apiserver.

use kubefan_testkit::certificates::{Content, Signer};
use rcgen::DnType;

use super::*;

const CN: Oid<'static> = OID_X509_COMMON_NAME;
const O: Oid<'static> = OID_X509_ORGANIZATION_NAME;
const OU: Oid<'static> = oid!(2.5.4.11);

fn user(attributes: &[(Oid<'static>, Tag, &[u8])]) -> Result<Identity, NoUser> {
    let attributes = attributes
        .iter()
        .map(|(name, tag, value)| AttributeTypeAndValue::new(name.clone(), Any::from_tag_and_data(*tag, value)));
    user_of(attributes.collect::<Vec<_>>().iter())
}

fn utf8(name: Oid<'static>, value: &'static str) -> (Oid<'static>, Tag, &'static [u8]) {
    (name, Tag::Utf8String, value.as_bytes())
}

#[test]
fn a_certificate_names_a_user_its_groups_and_itself() {
    let mut content = Content::client("alice", "readers");
    content.0.distinguished_name.push(DnType::CustomDnType(vec![2, 5, 4, 10]), "writers");
    content.0.distinguished_name.push(DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 57683, 2]), "the-uid");
    let signer = Signer::root(content);
    let identity = holder(&signer.der).unwrap();
    assert_eq!((identity.user.as_str(), identity.uid.as_str()), ("alice", "the-uid"));
    assert_eq!(identity.groups, ["readers", "writers", "system:authenticated"]);
    let digest: String = digest(&SHA256, &signer.der).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let keys: Vec<_> = identity.extra.into_iter().collect();
    let expected = ("authentication.kubernetes.io/credential-id".to_owned(), vec![format!("X509SHA256={digest}")]);
    assert_eq!(keys, [expected]);
}

#[test]
fn the_last_common_name_counts_and_groups_keep_their_order() {
    let identity = user(&[utf8(CN, "first"), utf8(O, "b"), utf8(OU, "x"), utf8(CN, "last"), utf8(O, "a")]).unwrap();
    assert_eq!((identity.user.as_str(), identity.groups), ("last", vec!["b".to_owned(), "a".to_owned()]));
    assert_eq!(user(&[utf8(CN, "first"), utf8(CN, "")]), Err(NoUser::Nameless), "an empty one counts, too");
}

#[test]
fn without_a_common_name_there_is_no_user() {
    for subject in [&[][..], &[utf8(O, "system:masters")], &[utf8(CN, "")]] {
        assert_eq!(user(subject), Err(NoUser::Nameless));
    }
}

#[test]
fn a_uid_is_one_text_that_is_not_empty() {
    assert_eq!(user(&[utf8(CN, "a"), utf8(UID, "u")]).unwrap().uid, "u");
    assert_eq!(user(&[utf8(CN, "a")]).unwrap().uid, "");
    assert_eq!(user(&[utf8(CN, "a"), utf8(UID, "")]), Err(NoUser::Unusable));
    assert_eq!(user(&[utf8(CN, "a"), utf8(UID, "u"), utf8(UID, "u")]), Err(NoUser::Unusable));
    // Without a name the uid is not looked at.
    assert_eq!(user(&[utf8(UID, "")]), Err(NoUser::Nameless));
}

#[test]
fn texts_are_read_as_go_reads_them() {
    let name = |tag, bytes: &[u8]| user(&[(CN, tag, bytes)]).map(|identity| identity.user);
    for (tag, bytes, expected) in [
        (Tag::Utf8String, "\u{e4}".as_bytes(), "\u{e4}"),
        (Tag::PrintableString, b"system:node:a-b.c*&", "system:node:a-b.c*&"),
        (Tag::Ia5String, b"a@b", "a@b"),
        (Tag::NumericString, b"1 2", "1 2"),
        (Tag::T61String, b"\xe4", "\u{e4}"),
        (Tag::BmpString, b"\0a\x20\xac\0\0", "a\u{20ac}"),
    ] {
        assert_eq!(name(tag, bytes).as_deref(), Ok(expected), "{tag:?}");
    }
    for (tag, bytes) in [
        (Tag::Utf8String, &b"\xff"[..]),
        (Tag::PrintableString, b"a@b"),
        (Tag::Ia5String, b"\x80"),
        (Tag::NumericString, b"a"),
        (Tag::BmpString, b"a"),
        (Tag::BmpString, b"\xd8\0"),
        (Tag::BmpString, b"\xff\xfe"),
        (Tag::OctetString, b"a"),
        (Tag::Integer, b"1"),
    ] {
        assert_eq!(name(tag, bytes), Err(NoUser::Unusable), "{tag:?}");
        assert_eq!(user(&[(OU, tag, bytes), utf8(CN, "a")]).err(), Some(NoUser::Unusable), "{tag:?}");
    }
}
