//! Verdicts of a connection's certificate while time passes and CAs change.

use std::time::Duration;

use kubefan_testkit::certificates::{Content, Signer, now};
use tokio::time::advance;

use super::*;

const DAY: Duration = Duration::from_secs(86_400);

fn trusting(ca: &Signer) -> Arc<TrustedCas> {
    let cas = TrustedCas::unread(now, Vec::new());
    cas.replace(ca.pem.as_bytes()).unwrap();
    cas
}

fn certificate(client: &Signer, cas: &Arc<TrustedCas>) -> Arc<ClientCertificate> {
    ClientCertificate::new(std::slice::from_ref(&client.der), cas.clone())
}

/// The user, or the reason.
fn said(certificate: &ClientCertificate) -> Result<String, &'static str> {
    match certificate.verdict() {
        CertificateVerdict::Known(caller) => Ok(caller.identity.user.clone()),
        CertificateVerdict::Nothing(why) | CertificateVerdict::Refused(why) | CertificateVerdict::Unavailable(why) => {
            Err(why)
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_is_known_until_the_certificate_ends() {
    let ca = Signer::root(Content::ca("ca"));
    let certificate = certificate(&ca.sign(Content::client("alice", "readers")), &trusting(&ca));
    let CertificateVerdict::Known(caller) = certificate.verdict() else { panic!("she is known") };
    assert_eq!(caller.expires_at, Some(Instant::now() + DAY));
    advance(DAY - Duration::from_secs(1)).await;
    assert_eq!(said(&certificate).as_deref(), Ok("alice"));
    advance(Duration::from_secs(1)).await;
    assert_eq!(said(&certificate), Err(WRONG_TIME));
}

#[tokio::test(start_paused = true)]
async fn a_holder_is_known_no_longer_than_the_cas_above_its_certificate() {
    let root = Signer::root(Content::ca("root").days(1, 3));
    let between = root.sign(Content::ca("between").days(1, 2));
    let client = between.sign(Content::client("alice", "readers").days(1, 4));
    let certificate = ClientCertificate::new(&[client.der.clone(), between.der], trusting(&root));
    let CertificateVerdict::Known(caller) = certificate.verdict() else { panic!("she is known") };
    assert_eq!(caller.expires_at, Some(Instant::now() + 2 * DAY));
    let direct = root.sign(Content::client("alice", "readers").days(1, 4));
    let CertificateVerdict::Known(caller) = self::certificate(&direct, &trusting(&root)).verdict() else {
        panic!("she is known")
    };
    assert_eq!(caller.expires_at, Some(Instant::now() + 3 * DAY));
}

#[tokio::test]
async fn a_live_connection_is_refused_when_its_ca_is_no_longer_trusted() {
    let ca = Signer::root(Content::ca("ca"));
    let other = Signer::root(Content::ca("ca"));
    let cas = trusting(&ca);
    let client = ca.sign(Content::client("alice", "readers"));
    let live = certificate(&client, &cas);
    assert_eq!(said(&live).as_deref(), Ok("alice"));
    cas.replace(other.pem.as_bytes()).unwrap();
    assert_eq!(said(&live), Err(UNKNOWN_CA));
    cas.replace(ca.pem.as_bytes()).unwrap();
    assert_eq!(said(&live).as_deref(), Ok("alice"));
}

#[tokio::test]
async fn a_refused_connection_is_asked_again_when_the_cas_have_changed() {
    let ca = Signer::root(Content::ca("ca"));
    let other = Signer::root(Content::ca("other"));
    let cas = TrustedCas::unread(now, Vec::new());
    let certificate = certificate(&ca.sign(Content::client("alice", "readers")), &cas);
    assert!(matches!(certificate.verdict(), CertificateVerdict::Unavailable(UNREAD)));
    cas.trust_none();
    assert!(matches!(certificate.verdict(), CertificateVerdict::Nothing(NO_CA)));
    cas.replace(other.pem.as_bytes()).unwrap();
    assert!(matches!(certificate.verdict(), CertificateVerdict::Refused(UNKNOWN_CA)));
    let both = format!("{}{}", other.pem, ca.pem);
    cas.replace(both.as_bytes()).unwrap();
    assert_eq!(said(&certificate).as_deref(), Ok("alice"));
}

#[tokio::test]
async fn a_certificate_that_names_no_user_says_why() {
    let ca = Signer::root(Content::ca("ca"));
    let said = |content: Content| certificate(&ca.sign(content), &trusting(&ca)).verdict();
    assert!(matches!(said(Content::client("", "readers")), CertificateVerdict::Nothing(NAMELESS)));
    assert!(matches!(said(Content::client("a", "b").days(2, -1)), CertificateVerdict::Refused(WRONG_TIME)));
    let server = Content::client("a", "b").usages(&[rcgen::ExtendedKeyUsagePurpose::ServerAuth]);
    assert!(matches!(said(server), CertificateVerdict::Refused(WRONG_USAGE)));
    let mut no_uid = Content::client("a", "b");
    no_uid.0.distinguished_name.push(rcgen::DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 57683, 2]), "");
    assert!(matches!(said(no_uid), CertificateVerdict::Refused(UNUSABLE)));
}

#[tokio::test]
async fn ignored_extras_are_left_out() {
    let ca = Signer::root(Content::ca("ca"));
    let client = ca.sign(Content::client("alice", "readers"));
    let extras = |ignored: &[&str]| {
        let cas = TrustedCas::unread(now, ignored.iter().map(|key| (*key).to_owned()).collect());
        cas.replace(ca.pem.as_bytes()).unwrap();
        let CertificateVerdict::Known(caller) = certificate(&client, &cas).verdict() else { panic!("she is known") };
        caller.identity.extra.len()
    };
    assert_eq!((extras(&[]), extras(&["authentication.kubernetes.io/credential-id"])), (1, 0));
}
