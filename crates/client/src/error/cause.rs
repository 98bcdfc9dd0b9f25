//! Why a connection failed, in words for people. A TLS library says what it found
//! (`UnknownIssuer`); people need to know what is wrong with which setting.

use std::error::Error;

use kubefan_common::text::{find, innermost};
use rustls::{CertificateError, InvalidMessage};

/// The text for a plaintext connection to a port that needs TLS.
pub(crate) const NEEDS_TLS: &str = "the server needs TLS on this port; use an https:// address";

/// The cause of an error: what TLS refused, or the text of the innermost error.
pub(crate) fn root_cause(error: &(dyn Error + 'static)) -> String {
    if let Some(tls) = find::<rustls::Error>(error) {
        return explain(tls);
    }
    let text = innermost(error).to_string();
    // Cuts the error number off, as in "Connection refused (os error 111)".
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

fn explain(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(problem) => explain_certificate(problem),
        // Plaintext, such as a response of HTTP, read as a TLS record.
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the server does not speak TLS on this port; use an address without https://".to_owned()
        }
        other => format!("TLS failed: {other}"),
    }
}

fn explain_certificate(problem: &CertificateError) -> String {
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
            "no trusted CA has signed the server's certificate; the CA file must contain the CA that has".to_owned()
        }
        CertificateError::Other(other) if format!("{other:?}").contains("CaUsedAsEndEntity") => {
            "the server's certificate is itself a CA's; its CA must sign another one for the server".to_owned()
        }
        other => format!("the server's certificate is refused: {other}"),
    }
}

/// A duration in whole units, of which there are at least two.
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
    use std::{io, time::Duration};

    use rustls::pki_types::UnixTime;

    use super::*;

    #[test]
    fn what_tls_refuses_is_said_in_the_users_terms() {
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let expired = CertificateError::ExpiredContext { time: at(10 * 86_400), not_after: at(86_400) };
        for (error, text) in [
            (rustls::Error::InvalidCertificate(expired), "the server's certificate expired 9 days ago"),
            (rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer), "no trusted CA has signed"),
            (rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType), "does not speak TLS on this port"),
            (rustls::Error::HandshakeNotComplete, "TLS failed: "),
        ] {
            let wrapped = io::Error::new(io::ErrorKind::InvalidData, error);
            assert!(root_cause(&wrapped).contains(text), "{}", root_cause(&wrapped));
        }
        assert_eq!(root_cause(&io::Error::from_raw_os_error(111)), "Connection refused");
    }

    #[test]
    fn durations_have_one_unit() {
        let cases = [(119, "119 s"), (120, "2 minutes"), (7_200, "2 hours"), (172_800, "2 days")];
        for (seconds, text) in cases {
            assert_eq!(duration(seconds), text);
        }
    }
}
