//! The group "certificates": the files of the data port, of the peers and of the CAs of clients.

use std::{fs, path::Path};

use jiff::Timestamp;

use kubefan_access::TrustedCas;
use kubefan_app::config::{ServeConfig, TlsSource};
use kubefan_managed_tls::certificate_facts::{CertificateFacts, WrongTime, date};

use super::{
    configuration::reviews_callers,
    report::{Finding, Report},
};

/// A certificate that ends within this time is warned of, in seconds. cert-manager renews one of 90
/// days 30 days before its end, so less means that a renewal has failed.
const EXPIRES_SOON_SECONDS: i64 = 14 * 24 * 3600;
/// The names to show of a certificate.
const NAMES_MAX: usize = 5;

/// Checks the files.
pub(super) fn check(config: &ServeConfig, report: &mut Report) {
    report.group("certificates");
    match &config.serving.tls {
        None => report.add(Finding::ok("data port", "without TLS (--tls-cert-file)")),
        // The certificate is in the cluster: see `managed_certificate`.
        Some(TlsSource::Managed(managed)) => {
            report.add(Finding::ok("data port", format!("managed, in the Secret {}", managed.secret)));
        }
        Some(TlsSource::Files(files)) => report.add_all(match files.check() {
            Ok(()) => dated("data port", &files.cert_file, Content::Chain),
            Err(error) => vec![Finding::error("data port", error.to_string(), "name a certificate and its own key")],
        }),
    }
    if let Some(file) = &config.callers.client_ca_file {
        report.add_all(match TrustedCas::of_file(file.clone(), wall_clock, Vec::new()) {
            Ok(_) => dated("CAs of clients", file, Content::Cas),
            Err(error) => vec![Finding::error("CAs of clients", error.to_string(), "name a PEM file of CAs")],
        });
    } else if reviews_callers(config) && config.callers.skip_lookup {
        report
            .add(Finding::ok("CAs of clients", "client certificates are not taken (tuning.authenticationSkipLookup)"));
    }
    if let Some(tls) = kubefan_app::peers::files(config) {
        report.add_all(match tls.check() {
            Ok(()) => {
                let own = dated("peers", &tls.cert_file, Content::Chain);
                [own, dated("CA of peers", &tls.ca_file, Content::Cas)].concat()
            }
            Err(error) => {
                let remedy =
                    "name a certificate, its own key and a CA (--peer-cert-file, --peer-key-file, --peer-ca-file)";
                vec![Finding::error("peers", error.to_string(), remedy)]
            }
        });
    }
}

/// Content of a certificate file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    /// A certificate that is presented, and those that lead to its CA.
    Chain,
    /// CAs.
    Cas,
}

/// Returns findings about the dates of the certificates in a file: of the first one in a chain, or
/// of all CAs.
fn dated(check: &str, file: &Path, content: Content) -> Vec<Finding> {
    let facts = CertificateFacts::all_of_pem(&fs::read(file).unwrap_or_default());
    let now = Timestamp::try_from(wall_clock()).unwrap_or_default().as_second();
    let seen = if content == Content::Cas { facts.as_slice() } else { &facts[..facts.len().min(1)] };
    seen.iter().map(|facts| judge(check, &file.display().to_string(), facts, now)).collect()
}

/// Judges the dates of a certificate. `now` is in seconds since 1970.
fn judge(check: &str, file: &str, facts: &CertificateFacts, now: i64) -> Finding {
    let names = match facts.names.as_slice() {
        [] => String::new(),
        names => {
            let more = names.len().saturating_sub(NAMES_MAX);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!(" for {}{more}", names[..names.len().min(NAMES_MAX)].join(", "))
        }
    };
    let end = date(facts.not_after);
    if let Some(wrong) = facts.wrong_at(now) {
        let remedy = match wrong {
            WrongTime::Expired(_) => "renew it",
            WrongTime::NotYet(_) => "correct the clock, or issue it again",
        };
        Finding::error(check, format!("{file} {wrong}"), remedy)
    } else if facts.not_after - now < EXPIRES_SOON_SECONDS {
        let days = (facts.not_after - now) / (24 * 3600);
        Finding::warning(check, format!("{file}{names} expires in {days} days, on {end}"), "renew it")
    } else {
        Finding::ok(check, format!("{file}{names}, valid until {end}"))
    }
}

#[expect(clippy::disallowed_methods, reason = "a command reads the time once, when it needs it")]
pub(super) fn wall_clock() -> std::time::SystemTime {
    std::time::SystemTime::now()
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::*;

    #[test]
    fn a_certificate_is_judged_by_its_dates() {
        const DAY: i64 = 24 * 3600;
        let now = 1_800_000_000;
        let cases = [
            ((-10, 90), Outcome::Ok, "for kubefan.svc, valid until 2027-04-15T08:00:00Z"),
            ((-10, 13), Outcome::Warning, "expires in 13 days"),
            ((-10, -1), Outcome::Error, "has expired: it was valid until 2027-01-14T08:00:00Z"),
            ((1, 90), Outcome::Error, "is not valid before 2027-01-16T08:00:00Z"),
        ];
        for ((from, to), outcome, text) in cases {
            let facts = CertificateFacts {
                not_before: now + from * DAY,
                not_after: now + to * DAY,
                names: vec!["kubefan.svc".to_owned()],
            };
            let finding = judge("data port", "tls.crt", &facts, now);
            assert_eq!(finding.result, outcome, "{finding:?}");
            assert!(finding.message.starts_with("tls.crt") && finding.message.contains(text), "{finding:?}");
        }
    }

    #[test]
    fn a_certificate_with_many_names_shows_the_first() {
        let names = (0..7).map(|number| format!("n{number}")).collect();
        let facts = CertificateFacts { not_before: 0, not_after: i64::from(i32::MAX), names };
        let message = judge("data port", "tls.crt", &facts, 1).message;
        assert!(message.contains("for n0, n1, n2, n3, n4 and 2 more"), "{message}");
    }
}
