//! The choice of the data port's certificate (section "Serving"): from files, or managed.

use std::{path::PathBuf, time};

use kubefan_managed_tls::{Lifetimes, ManagedOptions, ObjectName, PEER_NAME, is_dns_label};
use kubefan_server::transport::certificate::TlsFiles;

use super::{ConfigError, Duration, rules::unusable};

/// The ConfigMaps that the CA may be written to, and the copies of the certificate.
const OBJECTS_MAX: usize = 1000;
/// The names of the certificate.
const DNS_NAMES_MAX: usize = 100;
/// The shortest time that may be configured. Less leaves no time for a look at the Secret.
const LIFETIME_MIN: Duration = Duration::from_secs(4);
/// The longest.
const LIFETIME_MAX: Duration = Duration::from_secs(20 * 365 * 24 * 3600);

const COPIES_FLAG: &str = "--tls-managed-copies";
const DNS_NAMES_FLAG: &str = "--tls-managed-dns-names";
const DAY_SECONDS: u64 = 24 * 3600;
/// A certificate of 90 days is renewed 30 days before its end, as cert-manager does.
pub(super) const DEFAULT_LIFETIMES: Lifetimes = Lifetimes {
    certificate: time::Duration::from_secs(90 * DAY_SECONDS),
    ca: time::Duration::from_secs(3 * 365 * DAY_SECONDS),
    overlap: time::Duration::from_secs(30 * DAY_SECONDS),
};

/// The source of the certificate of the data port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsSource {
    /// From files.
    Files(TlsFiles),
    /// kubefan makes it.
    Managed(ManagedOptions),
}

/// The given settings of the certificate.
#[derive(Debug, Clone, Default)]
pub(super) struct Given {
    pub(super) secret: Option<ObjectName>,
    pub(super) dns_names: Option<Vec<String>>,
    pub(super) ca_config_maps: Option<Vec<ObjectName>>,
    pub(super) copies: Option<Vec<ObjectName>>,
    pub(super) lifetime: Option<Duration>,
    pub(super) ca_lifetime: Option<Duration>,
    pub(super) ca_overlap: Option<Duration>,
    /// The certificate and its key in files.
    pub(super) cert_file: Option<PathBuf>,
    pub(super) private_key_file: Option<PathBuf>,
}

/// A time that a certificate is valid, or published.
fn lifetime(
    flag: &'static str,
    given: Option<Duration>,
    default: time::Duration,
) -> Result<time::Duration, ConfigError> {
    let Some(given) = given else { return Ok(default) };
    if given < LIFETIME_MIN || given > LIFETIME_MAX {
        return Err(unusable(flag, given, format!("must be from {LIFETIME_MIN} to {LIFETIME_MAX}")));
    }
    Ok(given.0)
}

/// Refuses a choice that is incomplete or not one: an operator would believe in the rest of it.
fn check_choice(options: &Given) -> Result<(), ConfigError> {
    let files = [
        ("--tls-cert-file", options.cert_file.is_some()),
        ("--tls-private-key-file", options.private_key_file.is_some()),
    ];
    let managed = [
        ("--tls-managed-secret", options.secret.is_some()),
        (DNS_NAMES_FLAG, options.dns_names.as_ref().is_some_and(|names| !names.is_empty())),
    ];
    let for_managed =
        [("--tls-managed-ca-config-maps", options.ca_config_maps.is_some()), (COPIES_FLAG, options.copies.is_some())];
    let given = |flags: &[(&'static str, bool)]| flags.iter().find(|(_, given)| *given).map(|(flag, _)| *flag);
    let missing = |flags: &[(&'static str, bool)]| flags.iter().find(|(_, given)| !given).map(|(flag, _)| *flag);
    let problem = match (given(&files), given(&managed).or_else(|| given(&for_managed))) {
        (Some(file), Some(managed)) => Some(format!("{managed} excludes {file}")),
        (Some(file), None) => missing(&files).map(|missing| format!("{file} needs {missing}")),
        (None, Some(flag)) => missing(&managed).map(|missing| format!("{flag} needs {missing}")),
        (None, None) => None,
    };
    problem.map_or(Ok(()), |problem| {
        ConfigError::contradiction(format!(
            "{problem}: the certificate is either in --tls-cert-file and --tls-private-key-file, or kubefan makes it, in \
             --tls-managed-secret for --tls-managed-dns-names"
        ))
    })
}

/// The certificate, if there is one.
pub(super) fn source(options: &Given) -> Result<Option<TlsSource>, ConfigError> {
    check_choice(options)?;
    if let (Some(cert_file), Some(private_key_file)) = (options.cert_file.clone(), options.private_key_file.clone()) {
        return Ok(Some(TlsSource::Files(TlsFiles { cert_file, private_key_file })));
    }
    let Some(secret) = options.secret.clone() else { return Ok(None) };
    let dns_names = dns_names(options.dns_names.as_deref().unwrap_or_default())?;
    let ca_config_maps = objects("--tls-managed-ca-config-maps", options.ca_config_maps.clone())?;
    let copies = objects(COPIES_FLAG, options.copies.clone())?;
    // It would lose the CA's key.
    if copies.contains(&secret) {
        let problem = "the Secret of --tls-managed-secret, which has the CA's key; name another one";
        return Err(unusable(COPIES_FLAG, &secret, problem));
    }
    let lifetimes = Lifetimes {
        certificate: lifetime("tuning.tlsManagedLifetime", options.lifetime, DEFAULT_LIFETIMES.certificate)?,
        ca: lifetime("tuning.tlsManagedCaLifetime", options.ca_lifetime, DEFAULT_LIFETIMES.ca)?,
        overlap: lifetime("tuning.tlsManagedCaOverlap", options.ca_overlap, DEFAULT_LIFETIMES.overlap)?,
    };
    if lifetimes.ca < lifetimes.ca_min() {
        let problem = format!(
            "too short: with tuning.tlsManagedLifetime {} and tuning.tlsManagedCaOverlap {} it must be at least {}",
            Duration(lifetimes.certificate),
            Duration(lifetimes.overlap),
            Duration(lifetimes.ca_min()),
        );
        return Err(unusable("tuning.tlsManagedCaLifetime", Duration(lifetimes.ca), problem));
    }
    Ok(Some(TlsSource::Managed(ManagedOptions { secret, dns_names, ca_config_maps, copies, lifetimes })))
}

fn objects(flag: &'static str, given: Option<Vec<ObjectName>>) -> Result<Vec<ObjectName>, ConfigError> {
    let objects = given.unwrap_or_default();
    if objects.len() > OBJECTS_MAX {
        return Err(unusable(flag, objects.len(), format!("at most {OBJECTS_MAX} objects")));
    }
    if let Some(twice) = (1..objects.len()).find(|place| objects[..*place].contains(&objects[*place])) {
        return Err(unusable(flag, &objects[twice], "given twice; once is enough"));
    }
    Ok(objects)
}

fn dns_names(given: &[String]) -> Result<Vec<String>, ConfigError> {
    const FLAG: &str = DNS_NAMES_FLAG;
    if given.len() > DNS_NAMES_MAX {
        return Err(unusable(FLAG, given.len(), format!("at most {DNS_NAMES_MAX} names")));
    }
    let (_, peers_domain) = PEER_NAME.split_once('.').unwrap_or_default();
    let mut names: Vec<String> = Vec::new();
    for name in given {
        let lower = name.to_ascii_lowercase();
        let plain = lower.strip_prefix("*.").unwrap_or(&lower);
        if lower.len() > 253 || !plain.split('.').all(is_dns_label) {
            return Err(unusable(FLAG, name, "no DNS name; write it like kubefan.kubefan.svc or *.example.com"));
        }
        // A holder of the serving certificate must not pass for a replica.
        if plain == PEER_NAME || plain == peers_domain {
            return Err(unusable(
                FLAG,
                name,
                "the name with which replicas prove themselves to each other; leave it out",
            ));
        }
        if !names.contains(&lower) {
            names.push(lower);
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(change: impl FnOnce(&mut Given)) -> Result<Option<TlsSource>, String> {
        let mut options = Given {
            secret: Some("kubefan/kubefan-tls".parse().unwrap()),
            dns_names: Some(vec!["kubefan.kubefan.svc".to_owned()]),
            ..Given::default()
        };
        change(&mut options);
        source(&options).map_err(|error| error.to_string())
    }

    #[test]
    fn the_managed_certificate_has_names_in_lower_case_and_default_lifetimes() {
        let names = ["Kubefan", "kubefan", "*.kubefan-headless.kubefan.svc"].map(ToOwned::to_owned).to_vec();
        let Ok(Some(TlsSource::Managed(managed))) = given(|options| options.dns_names = Some(names)) else {
            panic!("it is managed")
        };
        assert_eq!(managed.dns_names, ["kubefan", "*.kubefan-headless.kubefan.svc"]);
        assert_eq!(
            (managed.secret.to_string().as_str(), managed.lifetimes),
            ("kubefan/kubefan-tls", DEFAULT_LIFETIMES)
        );
        assert!(DEFAULT_LIFETIMES.ca >= DEFAULT_LIFETIMES.ca_min());
    }

    #[test]
    fn contradictory_values_are_refused_with_their_flag() {
        let problem = |change: fn(&mut Given)| given(change).unwrap_err();
        let names = |options: &mut Given, name: &str| options.dns_names = Some(vec![name.to_owned()]);
        let both = problem(|options| options.cert_file = Some("a".into()));
        assert!(both.starts_with("--tls-managed-secret excludes --tls-cert-file: the certificate is either"), "{both}");
        assert!(problem(|options| options.dns_names = None).contains("needs --tls-managed-dns-names"));
        assert!(
            problem(|options| options.secret = None).contains("--tls-managed-dns-names needs --tls-managed-secret")
        );
        for name in ["", "a b", "https://a", "10.0.0.1:1", "*", "a.*.b", "-a"] {
            let refused = given(|options| names(options, name)).unwrap_err();
            assert!(refused.starts_with("--tls-managed-dns-names ") && refused.contains("no DNS name"), "{refused}");
        }
        for name in [PEER_NAME, "Peer.Kubefan.Internal", "*.kubefan.internal"] {
            assert!(given(|options| names(options, name)).unwrap_err().contains("prove themselves"), "{name}");
        }
        let short = problem(|options| options.ca_lifetime = Some(Duration::from_secs(300 * DAY_SECONDS - 1)));
        assert!(short.contains("it must be at least 7200h"), "{short}");
        let twice = problem(|options| options.ca_config_maps = Some(vec!["a/b".parse().unwrap(); 2]));
        assert!(twice.contains("given twice"), "{twice}");
        let twice = problem(|options| options.copies = Some(vec!["a/b".parse().unwrap(); 2]));
        assert!(twice.starts_with("--tls-managed-copies ") && twice.contains("given twice"), "{twice}");
        let itself = problem(|options| options.copies = options.secret.clone().map(|secret| vec![secret]));
        assert!(itself.contains("which has the CA's key"), "{itself}");
        for time in [Duration::from_secs(3), Duration::from_secs(u64::MAX / 4)] {
            let refused = given(|options| options.ca_overlap = Some(time)).unwrap_err();
            assert!(refused.starts_with("tuning.tlsManagedCaOverlap "), "{refused}");
            assert!(refused.contains("must be from 4s to 175200h"), "{refused}");
        }
        for text in ["", "a", "/a", "a/", "a/b/c", "A/b", "a/..", "a.b/c"] {
            assert!(text.parse::<kubefan_managed_tls::ObjectName>().is_err(), "{text}");
        }
    }
}
