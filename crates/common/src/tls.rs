//! Explains why TLS failed, in words for people. A TLS library names its finding (`UnknownIssuer`);
//! people need to know which setting is wrong, and how.

use rustls::{CertificateError, InvalidMessage, pki_types::pem};

/// The settings of a program's user, as ends of sentences.
#[derive(Debug, Clone, Copy)]
pub struct TlsSettings {
    /// Advice if the server's CA is not trusted.
    pub trust: &'static str,
    /// Advice if the server does not speak TLS.
    pub plaintext: &'static str,
}

/// Explains why TLS refused the connection; `None` if the library's own text is best.
pub fn explain(error: &rustls::Error, settings: TlsSettings) -> Option<String> {
    match error {
        rustls::Error::InvalidCertificate(problem) => Some(explain_certificate(problem, settings)),
        // Plaintext, such as a response of HTTP, read as a TLS record.
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            Some(format!("the server does not speak TLS on this port; {}", settings.plaintext))
        }
        _ => None,
    }
}

/// The text of the innermost error of a connection, with the library's words for a connection that
/// was cut off replaced: those are about a risk of protocols without frames.
pub fn plain(text: &str) -> &str {
    if text.contains("close_notify") {
        "the server closed the connection without ending TLS, as a process that is killed does"
    } else {
        text
    }
}

/// Names the fault of a PEM file. The library's error quotes the file, which may be a private key.
pub fn explain_pem(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::MissingSectionEnd { .. } => "a PEM section has no END line; are line feeds missing?",
        pem::Error::IllegalSectionStart { .. } => {
            "the BEGIN line of a PEM section is malformed; are line feeds missing?"
        }
        pem::Error::Base64Decode(_) => "a PEM section is not base64",
        pem::Error::NoItemsFound => "it contains no such PEM section",
        pem::Error::SectionTooLarge => "a PEM section is too large",
        _ => "it is not PEM",
    }
}

fn explain_certificate(problem: &CertificateError, settings: TlsSettings) -> String {
    match problem {
        CertificateError::Expired => "the server's certificate has expired; it must be renewed".to_owned(),
        CertificateError::ExpiredContext { time, not_after } => {
            let ago = duration(time.as_secs().saturating_sub(not_after.as_secs()));
            format!("the server's certificate expired {ago} ago; it must be renewed")
        }
        CertificateError::NotValidYet => "the server's certificate is not valid yet; is a clock wrong?".to_owned(),
        CertificateError::NotValidYetContext { time, not_before } => {
            let left = duration(not_before.as_secs().saturating_sub(time.as_secs()));
            format!("the server's certificate is valid only in {left}; is a clock wrong?")
        }
        CertificateError::UnknownIssuer => {
            format!("no trusted CA has signed the server's certificate; {}", settings.trust)
        }
        CertificateError::Other(other) if format!("{other:?}").contains("CaUsedAsEndEntity") => {
            "the server's certificate is itself a CA's; its CA must sign another one for the server".to_owned()
        }
        other => format!("the server's certificate is refused: {other}"),
    }
}

/// Formats a duration in whole units, at least two of them.
fn duration(seconds: u64) -> String {
    match seconds {
        ..120 => format!("{seconds} s"),
        120..7_200 => format!("{} minutes", seconds / 60),
        7_200..172_800 => format!("{} hours", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls::pki_types::UnixTime;

    use super::*;

    #[test]
    fn tls_refusals_are_explained_in_the_users_terms() {
        let settings = TlsSettings { trust: "trust its CA", plaintext: "use http" };
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let expired = CertificateError::ExpiredContext { time: at(10 * 86_400), not_after: at(86_400) };
        for (error, text) in [
            (rustls::Error::InvalidCertificate(expired), "the server's certificate expired 9 days ago"),
            (
                rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer),
                "no trusted CA has signed the server's certificate; trust its CA",
            ),
            (
                rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType),
                "the server does not speak TLS on this port; use http",
            ),
        ] {
            let explained = explain(&error, settings).unwrap();
            assert!(explained.starts_with(text), "{explained}");
        }
        assert_eq!(explain(&rustls::Error::HandshakeNotComplete, settings), None);
    }

    #[test]
    fn a_connection_that_was_cut_off_is_described_without_the_librarys_manual() {
        let text = "peer closed connection without sending TLS close_notify: https://docs.rs/rustls/manual";
        assert!(plain(text).starts_with("the server closed the connection without ending TLS"));
        assert_eq!(plain("connection reset"), "connection reset");
    }

    #[test]
    fn durations_have_one_unit() {
        let cases = [(119, "119 s"), (120, "2 minutes"), (7_200, "2 hours"), (172_800, "2 days")];
        for (seconds, text) in cases {
            assert_eq!(duration(seconds), text);
        }
    }
}
