//! The bundle in use: it is replaced by usable ones only.

use kubefan_testkit::certificates::{Content, Signer, now};

use super::*;

fn ca() -> String {
    Signer::root(Content::ca("ca")).pem
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_is_used_and_a_broken_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.crt");
    let first = ca();
    let second = ca();
    std::fs::write(&file, &first).unwrap();
    let cas = TrustedCas::of_file(file.clone(), now, Vec::new()).unwrap();
    let generation = || cas.newest().1;
    let read_first = generation();
    std::fs::write(&file, &second).unwrap();
    assert_eq!(generation(), read_first, "the file is not read for each connection");
    tokio::time::advance(RENEWAL_INTERVAL).await;
    let read_second = generation();
    assert_ne!(read_second, read_first);
    for broken in [&second[..second.len() / 2], "", "no PEM"] {
        std::fs::write(&file, broken).unwrap();
        tokio::time::advance(RENEWAL_INTERVAL).await;
        assert_eq!(generation(), read_second, "{broken}");
        cas.reload();
        assert_eq!(generation(), read_second, "{broken}");
    }
    std::fs::remove_file(&file).unwrap();
    cas.reload();
    assert_eq!(generation(), read_second);
    std::fs::write(&file, first + &second).unwrap();
    cas.reload();
    let (Trusted::Bundle(bundle), newest) = cas.newest() else { panic!("it is read") };
    assert_eq!((bundle.len(), newest), (2, read_second + 1), "a reload does not wait");
}

#[test]
fn a_file_that_cannot_be_used_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.crt");
    let problem = || TrustedCas::of_file(file.clone(), now, Vec::new()).unwrap_err().to_string();
    let missing = problem();
    assert!(missing.starts_with("--client-ca-file ") && missing.contains("ca.crt: cannot read it: "), "{missing}");
    for text in ["", "x"] {
        std::fs::write(&file, text).unwrap();
        assert!(problem().ends_with("it contains no certificate of a CA (PEM) that may sign client certificates"));
    }
    std::fs::write(&file, vec![b' '; BUNDLE_BYTES_MAX as usize + 1]).unwrap();
    assert!(problem().contains("a bundle has at most 1048576"));
}

#[test]
fn cas_in_use_stay_when_a_lookup_finds_none() {
    let cas = TrustedCas::unread(now, Vec::new());
    assert!(matches!(cas.newest(), (Trusted::Unread, 0)));
    cas.trust_none();
    assert!(matches!(cas.newest(), (Trusted::None, 1)));
    let pem = ca();
    assert_eq!(cas.replace(pem.as_bytes()), Ok(true));
    assert_eq!(cas.replace(pem.as_bytes()), Ok(false), "the same");
    cas.trust_none();
    assert!(cas.replace(b"broken").is_err());
    assert!(matches!(cas.newest(), (Trusted::Bundle(_), 2)));
}
