//! Reads the content of the Secret, and makes its next content. Parts that cannot be read or do not
//! fit count as missing: the next step replaces them. No text here has content of the Secret.

use std::{borrow::Borrow, collections::BTreeMap, sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use jiff::Timestamp;
use rcgen::{KeyPair, PublicKeyData};
use rustls::{
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    sign::CertifiedKey,
};
use serde_json::{Value, json};
use webpki::{EndEntityCert, KeyUsage};
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use super::{
    certificate_facts::{CertificateFacts, date},
    issue::{self, BACKDATED_SECONDS, IssueError, Issued, KeyPem, Usage},
    managed_options::{ManagedOptions, Stored},
    renewal_plan::{CaFacts, LeafFacts, RenewalAction, SecretContents, signing_and_next},
};

const CERT: &str = "tls.crt";
const KEY: &str = "tls.key";
/// The bundle, also in the ConfigMaps.
const CA: &str = "ca.crt";
const CA_KEYS: &str = "ca.key";
/// The CA that was seen in all ConfigMaps, and the time since then: `ID TIME`.
const PUBLISHED: &str = "kubefan.dev/ca-published";
/// CAs that are read. More than four are never needed.
const CAS_MAX: usize = 16;
/// Names of a certificate. Replicas of two versions may want different ones, and get all of them.
const NAMES_MAX: usize = 256;

/// The part of the Secret that another object gets: values of `data`, as they are sent. A key with
/// null is removed from it.
pub(super) type Part = BTreeMap<&'static str, Value>;

/// Content of a Secret.
#[derive(Clone)]
pub struct Material {
    cas: Vec<Ca>,
    leaf: Option<Leaf>,
    pub(super) state: SecretContents,
}

#[derive(Clone)]
struct Ca {
    facts: CaFacts,
    der: CertificateDer<'static>,
    pem: String,
    key: Option<KeyPem>,
}

impl Borrow<CaFacts> for Ca {
    fn borrow(&self) -> &CaFacts {
        &self.facts
    }
}

#[derive(Clone)]
struct Leaf {
    pem: Vec<u8>,
    key: Vec<u8>,
    certified: Arc<CertifiedKey>,
    facts: CertificateFacts,
}

impl Material {
    /// Reads a Secret as JSON. `now` is in seconds since 1970.
    pub(super) fn read(secret: &Value, dns_names: &[String], now: u64) -> Self {
        let data = |key: &str| {
            let text = secret["data"][key].as_str().unwrap_or_default();
            BASE64_STANDARD.decode(text).unwrap_or_default()
        };
        let published = secret["metadata"]["annotations"][PUBLISHED].as_str().and_then(read_published);
        let cas = read_cas(&data(CA), &data(CA_KEYS));
        let leaf = read_leaf(data(CERT), data(KEY));
        let judged = leaf.as_ref().map_err(|why| *why).and_then(|leaf| judge(leaf, &cas, dns_names, now));
        let state = SecretContents { cas: cas.iter().map(|ca| ca.facts.clone()).collect(), leaf: judged, published };
        Self { cas, leaf: leaf.ok(), state }
    }

    /// The bundle: the CA that signs, the next one, and those that have signed before.
    pub(super) fn bundle(&self) -> String {
        self.cas.iter().map(|ca| ca.pem.as_str()).collect()
    }

    /// Returns the part of an object, if there is a certificate that can be used: never a CA's key.
    /// A node that mounts a copy may read all of it, whatever its pod mounts.
    pub(super) fn part(&self, stored: Stored) -> Part {
        let base64 = |bytes: &[u8]| Value::String(BASE64_STANDARD.encode(bytes));
        match (stored, &self.leaf) {
            (Stored::ConfigMap, _) => BTreeMap::from([(CA, Value::String(self.bundle()))]),
            (Stored::Copy, Some(leaf)) => BTreeMap::from([
                (CERT, base64(&leaf.pem)),
                (KEY, base64(&leaf.key)),
                (CA, base64(self.bundle().as_bytes())),
                (CA_KEYS, Value::Null),
            ]),
            (Stored::Copy, None) | (Stored::Secret, _) => Part::new(),
        }
    }

    /// The CAs of the bundle.
    pub(super) fn roots(&self) -> impl Iterator<Item = CertificateDer<'static>> {
        self.cas.iter().map(|ca| ca.der.clone())
    }

    /// The serving certificate. `None` if it cannot be used.
    pub(super) fn certified(&self) -> Option<(Arc<CertifiedKey>, LeafFacts)> {
        let facts = self.state.leaf.as_ref().ok()?;
        Some((self.leaf.as_ref()?.certified.clone(), facts.clone()))
    }

    /// The end of the CA that signs, in seconds since 1970. `None` if there is none.
    pub(super) fn signing_not_after(&self, now: u64) -> Option<u64> {
        signing_and_next(&self.state.cas, now).map(|(signing, _)| signing.not_after)
    }

    /// Describes the content in words. For reports.
    pub fn describe(&self, now: u64) -> Result<String, String> {
        let end = |second: u64| date(i64::try_from(second).unwrap_or(i64::MAX));
        let Some(ca) = self.signing_not_after(now) else { return Err("it has no CA that can be used".to_owned()) };
        match &self.state.leaf {
            Ok(leaf) => Ok(format!("valid until {}, its CA until {}", end(leaf.not_after), end(ca))),
            Err(why) => Err(format!("its certificate cannot be used: {why}")),
        }
    }

    /// Makes a certificate for a replica among its peers, until `not_after` at most.
    pub(super) fn peer_certificate(&self, now: u64, not_after: u64) -> Option<Result<Issued, IssueError>> {
        let (ca, _) = signing_and_next(&self.cas, now)?;
        let not_after = not_after.min(ca.facts.not_after);
        let names = [issue::PEER_NAME.to_owned()];
        Some(issue::certificate(&ca.pem, ca.key.as_ref()?, &names, Usage::Peer, now, not_after))
    }

    /// Changes the Secret by a step.
    ///
    /// # Errors
    /// A certificate cannot be made that clients accept. Then the Secret is as it was.
    pub(super) fn apply(
        mut self,
        step: RenewalAction,
        secret: &mut Value,
        options: &ManagedOptions,
        now: u64,
    ) -> Result<(), IssueError> {
        let lifetimes = &options.lifetimes;
        let mut published = self.state.published.take();
        self.cas.retain(|ca| now < ca.facts.not_after);
        match step {
            RenewalAction::Keep | RenewalAction::RemoveExpiredCas => {}
            RenewalAction::CreateCa => {
                self.cas = vec![Ca::make(now, lifetimes.ca)?];
                published = None;
                self.renew(&options.dns_names, options, now)?;
            }
            RenewalAction::CreateNextCa => self.cas.push(Ca::make(now, lifetimes.ca)?),
            RenewalAction::RecordPublication => published = self.next(now).map(|id| (id, now)),
            RenewalAction::SwitchToNextCa => {
                let next = self.next(now);
                for ca in self.cas.iter_mut().filter(|ca| Some(&ca.facts.id) != next.as_ref()) {
                    ca.forget_key();
                }
                published = None;
                self.renew(&self.names(&options.dns_names), options, now)?;
            }
            RenewalAction::RenewCertificate(_) => self.renew(&self.names(&options.dns_names), options, now)?,
        }
        self.write(secret, published, now);
        Ok(())
    }

    /// Returns the id of the next CA.
    fn next(&self, now: u64) -> Option<String> {
        let (_, next) = signing_and_next(&self.cas, now)?;
        next.map(|ca| ca.facts.id.clone())
    }

    /// The names of the next certificate: those that are wanted. While replicas of two versions
    /// want different names, the certificate has all, so that they do not replace each other's.
    fn names(&self, wanted: &[String]) -> Vec<String> {
        let mut names = wanted.to_vec();
        let is_of_others = self.state.leaf == Err(OTHER_NAMES);
        let others = self.leaf.iter().filter(|_| is_of_others).flat_map(|leaf| leaf.facts.names.iter());
        names.extend(others.filter(|name| !wanted.contains(name)).cloned());
        if names.len() > NAMES_MAX { wanted.to_vec() } else { names }
    }

    fn renew(&mut self, names: &[String], options: &ManagedOptions, now: u64) -> Result<(), IssueError> {
        let signing = signing_and_next(&self.cas, now);
        let Some((ca, key)) = signing.and_then(|(ca, _)| Some((ca, ca.key.as_ref()?))) else { return Ok(()) };
        let not_after = (now + options.lifetimes.certificate.as_secs()).min(ca.facts.not_after);
        let Issued { certificate, key } = issue::certificate(&ca.pem, key, names, Usage::Server, now, not_after)?;
        let leaf = read_leaf(certificate.into_bytes(), key.0.into_bytes()).map_err(IssueError::unusable)?;
        // A foreign CA may sign certificates that no client accepts. If written, they would be
        // renewed every time.
        judge(&leaf, &self.cas, names, now).map_err(IssueError::unusable)?;
        self.leaf = Some(leaf);
        Ok(())
    }

    fn write(&mut self, secret: &mut Value, published: Option<(String, u64)>, now: u64) {
        // The CA that signs first: some programs read only the first.
        let signing = signing_and_next(&self.cas, now).map(|(ca, _)| ca.facts.id.clone());
        let mut all: Vec<&Ca> = self.cas.iter().collect();
        all.sort_by_key(|ca| Some(&ca.facts.id) != signing.as_ref());
        let bundle: String = all.iter().map(|ca| ca.pem.as_str()).collect();
        let keys: String = all.iter().filter_map(|ca| Some(ca.key.as_ref()?.0.as_str())).collect();
        let mut data: BTreeMap<&str, &[u8]> = BTreeMap::from([(CA, bundle.as_bytes()), (CA_KEYS, keys.as_bytes())]);
        if let Some(leaf) = &self.leaf {
            data.extend([(CERT, leaf.pem.as_slice()), (KEY, leaf.key.as_slice())]);
        }
        if !secret["data"].is_object() {
            secret["data"] = json!({});
        }
        for (key, bytes) in data {
            secret["data"][key] = Value::String(BASE64_STANDARD.encode(bytes));
        }
        match published {
            Some((id, at)) => {
                if !secret["metadata"]["annotations"].is_object() {
                    secret["metadata"]["annotations"] = json!({});
                }
                let at = Timestamp::from_second(i64::try_from(at).unwrap_or_default()).unwrap_or_default();
                secret["metadata"]["annotations"][PUBLISHED] = Value::String(format!("{id} {at}"));
            }
            None => {
                if let Some(annotations) = secret["metadata"]["annotations"].as_object_mut() {
                    annotations.remove(PUBLISHED);
                }
            }
        }
    }
}

/// Reason to replace a certificate whose names are not those that are wanted.
const OTHER_NAMES: &str = "it lacks a name";

impl Ca {
    fn make(now: u64, life: Duration) -> Result<Self, IssueError> {
        let Issued { certificate, key } = issue::ca(now, now + life.as_secs())?;
        let mut cas = read_cas(certificate.as_bytes(), key.0.as_bytes());
        cas.pop().ok_or_else(|| rcgen::Error::CouldNotParseCertificate.into())
    }

    fn forget_key(&mut self) {
        self.key = None;
        self.facts.has_key = false;
    }
}

fn read_published(text: &str) -> Option<(String, u64)> {
    let (id, at) = text.split_once(' ')?;
    let at: Timestamp = at.parse().ok()?;
    Some((id.to_owned(), u64::try_from(at.as_second()).ok()?))
}

/// The CAs of a bundle, each once, with their keys.
fn read_cas(bundle: &[u8], keys: &[u8]) -> Vec<Ca> {
    let keys: Vec<(KeyPem, Vec<u8>)> = PrivateKeyDer::pem_slice_iter(keys)
        .take(CAS_MAX)
        .filter_map(|der| {
            let key = KeyPair::try_from(&der.ok()?).ok()?;
            Some((KeyPem(key.serialize_pem()), key.subject_public_key_info()))
        })
        .collect();
    let mut cas: Vec<Ca> = Vec::new();
    for der in CertificateDer::pem_slice_iter(bundle).take(CAS_MAX).filter_map(Result::ok) {
        let Some(ca) = read_ca(der, &keys) else { continue };
        if !cas.iter().any(|known| known.facts.id == ca.facts.id) {
            cas.push(ca);
        }
    }
    cas
}

fn read_ca(der: CertificateDer<'static>, keys: &[(KeyPem, Vec<u8>)]) -> Option<Ca> {
    let (_, parsed) = X509Certificate::from_der(&der).ok()?;
    if !parsed.is_ca() || webpki::anchor_from_trusted_cert(&der).is_err() {
        return None;
    }
    let key = keys.iter().find(|(_, public)| public == parsed.public_key().raw).map(|(key, _)| key.clone());
    let times = CertificateFacts::of_der(&der)?;
    let facts = CaFacts {
        id: id(&der),
        created: created(&times),
        not_after: u64::try_from(times.not_after).ok()?,
        has_key: key.is_some(),
    };
    let pem = pem("CERTIFICATE", &der);
    Some(Ca { facts, pem, key, der: der.clone() })
}

fn read_leaf(pem: Vec<u8>, key: Vec<u8>) -> Result<Leaf, &'static str> {
    if pem.is_empty() && key.is_empty() {
        return Err("there is none");
    }
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).take(CAS_MAX).collect();
    let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or("tls.crt is no certificate in PEM")?;
    let private = PrivateKeyDer::from_pem_slice(&key).map_err(|_| "tls.key is no private key in PEM")?;
    let facts = CertificateFacts::of_der(&chain[0]).ok_or("tls.crt cannot be parsed")?;
    let certified = CertifiedKey::from_der(chain, private, &ring::default_provider());
    let certified = certified.map_err(|_| "tls.key is not the key of tls.crt")?;
    Ok(Leaf { pem, key, certified: Arc::new(certified), facts })
}

/// Whether a client that knows the bundle accepts the certificate, for all names.
fn judge(leaf: &Leaf, cas: &[Ca], dns_names: &[String], now: u64) -> Result<LeafFacts, &'static str> {
    let der = leaf.certified.cert.first().ok_or("there is none")?;
    let parsed = EndEntityCert::try_from(der).map_err(|_| "tls.crt cannot be parsed")?;
    let anchors: Vec<_> = cas.iter().filter_map(|ca| webpki::anchor_from_trusted_cert(&ca.der).ok()).collect();
    let time = UnixTime::since_unix_epoch(Duration::from_secs(now));
    let algorithms = ring::default_provider().signature_verification_algorithms.all;
    match parsed.verify_for_usage(algorithms, &anchors, &[], time, KeyUsage::server_auth(), None, None) {
        Ok(_) => {}
        Err(webpki::Error::CertExpired { .. } | webpki::Error::CertNotValidYet { .. }) => {
            return Err("it is outside its time");
        }
        Err(_) => return Err("no CA of ca.crt has signed it"),
    }
    if !dns_names.iter().all(|name| leaf.facts.names.contains(name)) {
        return Err(OTHER_NAMES);
    }
    Ok(LeafFacts { created: created(&leaf.facts), not_after: u64::try_from(leaf.facts.not_after).unwrap_or_default() })
}

fn created(facts: &CertificateFacts) -> u64 {
    u64::try_from(facts.not_before).unwrap_or_default() + BACKDATED_SECONDS
}

/// The SHA-256 of a certificate, in hexadecimal digits.
fn id(der: &CertificateDer<'_>) -> String {
    let digest = ::ring::digest::digest(&::ring::digest::SHA256, der);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn pem(label: &str, der: &[u8]) -> String {
    let base64 = BASE64_STANDARD.encode(der);
    let lines: String =
        base64.as_bytes().chunks(64).flat_map(|line| [String::from_utf8_lossy(line), "\n".into()]).collect();
    format!("-----BEGIN {label}-----\n{lines}-----END {label}-----\n")
}
