//! A bundle trusts exactly the certificates that Go's `x509.Verify` trusts.

use kubefan_testkit::certificates::{Content, NOW_SECONDS, Signer};
use rcgen::{BasicConstraints, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose};

use super::*;

const NOW: Duration = Duration::from_secs(NOW_SECONDS);

fn alice() -> Content {
    Content::client("alice", "readers")
}

fn bundle(of: &[&Signer]) -> CaBundle {
    let pem: String = of.iter().map(|signer| signer.pem.as_str()).collect();
    CaBundle::parse(pem.as_bytes()).unwrap()
}

fn verify(bundle: &CaBundle, chain: &[&Signer]) -> Result<(), Untrusted> {
    let chain: Vec<_> = chain.iter().map(|signer| signer.der.clone()).collect();
    bundle.verify(&chain, NOW).map(drop)
}

#[test]
fn a_certificate_of_any_ca_of_the_bundle_is_trusted_and_of_no_other() {
    let one = Signer::root(Content::ca("one"));
    let other = Signer::root(Content::ca("other"));
    let foreign = Signer::root(Content::ca("one"));
    let both = bundle(&[&one, &other]);
    assert_eq!(both.len(), 2);
    for ca in [&one, &other] {
        assert_eq!(verify(&both, &[&ca.sign(alice())]), Ok(()));
    }
    // The foreign CA has the name of a trusted one.
    assert_eq!(verify(&both, &[&foreign.sign(alice())]), Err(Untrusted::UnknownCa));
    assert_eq!(verify(&both, &[&foreign.sign(alice()), &foreign]), Err(Untrusted::UnknownCa));
    assert_eq!(verify(&both, &[&Signer::root(alice())]), Err(Untrusted::UnknownCa));
    assert_eq!(verify(&both, &[]), Err(Untrusted::UnknownCa));
}

#[test]
fn a_chain_leads_over_cas_between_and_over_nothing_else() {
    let root = Signer::root(Content::ca("root"));
    let between = root.sign(Content::ca("between"));
    let lowest = between.sign(Content::ca("lowest"));
    let client = lowest.sign(alice());
    let trusted = bundle(&[&root]);
    assert_eq!(verify(&trusted, &[&client, &lowest, &between]), Ok(()));
    assert_eq!(verify(&trusted, &[&client, &between, &lowest]), Ok(()), "in any order");
    assert_eq!(verify(&trusted, &[&client, &between]), Err(Untrusted::UnknownCa), "one is missing");
    assert_eq!(verify(&bundle(&[&lowest]), &[&client]), Ok(()), "a CA need not be a root");
    // A client's certificate signs nothing.
    let bob = root.sign(Content::client("bob", "readers"));
    assert_eq!(verify(&trusted, &[&bob.sign(alice()), &bob]), Err(Untrusted::UnknownCa));
    let mut content = Content::ca("no signatures");
    content.0.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    let other_use = root.sign(content);
    assert_eq!(verify(&trusted, &[&other_use.sign(alice()), &other_use]), Err(Untrusted::UnknownCa));
}

#[test]
fn a_ca_limits_the_length_of_chains() {
    let mut content = Content::ca("root");
    content.0.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let root = Signer::root(content);
    let trusted = bundle(&[&root]);
    assert_eq!(verify(&trusted, &[&root.sign(alice())]), Ok(()));
    let between = root.sign(Content::ca("between"));
    assert_eq!(verify(&trusted, &[&between.sign(alice()), &between]), Err(Untrusted::UnknownCa));
}

#[test]
fn every_certificate_of_a_chain_must_be_valid_now() {
    for (before, after) in [(-1, 2), (2, -1)] {
        let root = Signer::root(Content::ca("root"));
        let wrong = root.sign(alice().days(before, after));
        assert_eq!(verify(&bundle(&[&root]), &[&wrong]), Err(Untrusted::WrongTime));
        let between = root.sign(Content::ca("between").days(before, after));
        let client = between.sign(alice());
        assert_ne!(verify(&bundle(&[&root]), &[&client, &between]), Ok(()));
        let old_root = Signer::root(Content::ca("root").days(before, after));
        let client = old_root.sign(alice());
        assert_eq!(verify(&bundle(&[&old_root]), &[&client]), Err(Untrusted::WrongTime), "Go checks roots, too");
    }
}

#[test]
fn every_certificate_of_a_chain_must_be_for_clients_or_name_no_usage() {
    use ExtendedKeyUsagePurpose::{Any, ClientAuth, ServerAuth};
    let root = Signer::root(Content::ca("root"));
    for (usages, expected) in [
        (&[][..], Ok(())),
        (&[Any], Ok(())),
        (&[ServerAuth, ClientAuth], Ok(())),
        (&[ServerAuth], Err(Untrusted::WrongUsage)),
    ] {
        assert_eq!(verify(&bundle(&[&root]), &[&root.sign(alice().usages(usages))]), expected, "{usages:?}");
        let between = root.sign(Content::ca("between").usages(usages));
        let result = verify(&bundle(&[&root]), &[&between.sign(alice()), &between]);
        assert_eq!(result.is_ok(), expected.is_ok(), "{usages:?}");
        let limited = Signer::root(Content::ca("root").usages(usages));
        assert_eq!(CaBundle::parse(limited.pem.as_bytes()).is_ok(), expected.is_ok(), "{usages:?}");
    }
}

/// A certificate that was put into the bundle to trust its holder must not let the holder name
/// other users.
#[test]
fn a_certificate_of_the_bundle_that_is_no_ca_signs_nothing() {
    let root = Signer::root(Content::ca("root"));
    let pinned = Signer::root(Content::client("pinned", "readers"));
    let both = bundle(&[&root, &pinned]);
    assert_eq!((both.len(), both.ignored()), (1, 1));
    assert_eq!(verify(&both, &[&pinned.sign(alice())]), Err(Untrusted::UnknownCa));
    assert_eq!(CaBundle::parse(pinned.pem.as_bytes()).err(), Some(BundleError::NoCa));
}

#[test]
fn a_bundle_that_is_broken_anywhere_is_refused() {
    let root = Signer::root(Content::ca("root")).pem;
    let text = format!("a comment\n{root}");
    assert_eq!(CaBundle::parse(text.as_bytes()).unwrap().len(), 1);
    let half = format!("{root}{}", &root[..root.len() / 2]);
    let garbage = format!("{root}-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    for broken in [half.as_str(), garbage.as_str()] {
        let error = CaBundle::parse(broken.as_bytes()).err();
        assert!(matches!(error, Some(BundleError::Unreadable { number: 2, .. })), "{error:?}");
    }
    for empty in ["", "no PEM", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"] {
        assert_eq!(CaBundle::parse(empty.as_bytes()).err(), Some(BundleError::NoCa), "{empty}");
    }
}

#[test]
fn a_key_in_the_place_of_the_bundle_is_not_quoted() {
    let key = rcgen::KeyPair::generate().unwrap().serialize_pem();
    for key in [key.replace('\n', " "), key.replace('\n', "\\n")] {
        let error = CaBundle::parse(key.as_bytes()).err().unwrap().to_string();
        assert!(error.ends_with("; are line feeds missing?"), "{error}");
    }
}
