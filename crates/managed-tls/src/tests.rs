//! The life of the managed certificate over several lives of a CA, with real certificates and
//! simulated time, apiserver and replicas; and the repair of a Secret that others have changed.

use std::{collections::VecDeque, time::Duration};

use rand::{RngExt, SeedableRng, rngs::SmallRng};
use rustls::{
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};
use serde_json::{Value, json};
use webpki::{EndEntityCert, KeyUsage};

use super::{
    issue::{self, Usage},
    managed_options::{Lifetimes, ManagedOptions, ObjectName, Stored},
    material::Material,
    renewal_plan::{CaFacts, LeafFacts, RenewalAction, SecretContents, next_step},
    stored_objects::fill,
};

const START: u64 = 1_800_000_000;
const DAY: u64 = 24 * 3600;
const NAME: &str = "kubefan.kubefan.svc";

fn options(lifetimes: Lifetimes) -> ManagedOptions {
    let secret: ObjectName = "kubefan/kubefan-tls".parse().unwrap();
    let dns_names = [NAME, "*.kubefan-headless.kubefan.svc"].map(str::to_owned).to_vec();
    ManagedOptions { secret, dns_names, ca_config_maps: Vec::new(), copies: Vec::new(), lifetimes }
}

fn days(certificate: u64, ca: u64, overlap: u64) -> Lifetimes {
    let days = |days: u64| Duration::from_secs(days * DAY);
    Lifetimes { certificate: days(certificate), ca: days(ca), overlap: days(overlap) }
}

fn empty() -> Value {
    json!({ "metadata": { "name": "kubefan-tls", "resourceVersion": "1" } })
}

/// Whether a client that has the bundle accepts the certificate at this time.
fn accepts(bundle: &str, certificate: &CertificateDer<'_>, usage: KeyUsage, name: &str, now: u64) -> bool {
    let ders: Vec<_> = CertificateDer::pem_slice_iter(bundle.as_bytes()).map(Result::unwrap).collect();
    let anchors: Vec<_> = ders.iter().map(|der| webpki::anchor_from_trusted_cert(der).unwrap()).collect();
    let leaf = EndEntityCert::try_from(certificate).unwrap();
    let algorithms = ring::default_provider().signature_verification_algorithms.all;
    let time = UnixTime::since_unix_epoch(Duration::from_secs(now));
    leaf.verify_for_usage(algorithms, &anchors, &[], time, usage, None, None).is_ok()
        && leaf.verify_is_valid_for_subject_name(&ServerName::try_from(name).unwrap()).is_ok()
}

/// Does all steps that are due, as if the ConfigMaps were always written at once.
fn settle(secret: &mut Value, options: &ManagedOptions, now: u64) -> Vec<RenewalAction> {
    let mut steps = Vec::new();
    loop {
        let material = Material::read(secret, &options.dns_names, now);
        let step = next_step(&material.state, true, now, &options.lifetimes, 0.0);
        if step == RenewalAction::Keep {
            return steps;
        }
        assert!(steps.len() < 5, "{steps:?} and {step:?}");
        steps.push(step);
        material.apply(step, secret, options, now).unwrap();
    }
}

struct Replica {
    jitter: f64,
    next_look: u64,
    /// The version that it has read, and the content.
    read: Option<(u64, Material)>,
    certificate: Option<(CertificateDer<'static>, u64)>,
}

struct World {
    options: ManagedOptions,
    random: SmallRng,
    secret: Value,
    version: u64,
    now: u64,
    replicas: Vec<Replica>,
    /// Content of the two ConfigMaps, each from a time on: the newest last.
    published: [VecDeque<(u64, String)>; 2],
    /// The copy, which nodes serve with.
    copy: Value,
    /// The end of the time in which the apiserver is away.
    away_until: u64,
    /// The end of the time in which it does not take the second ConfigMap and the copy.
    refuses_until: u64,
    steps: Vec<RenewalAction>,
    must_verify: bool,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let certificate = random.random_range(20..90);
        let overlap = random.random_range(5..40);
        let ca_min = days(certificate, 0, overlap).ca_min().as_secs() / DAY;
        let lifetimes = days(certificate, random.random_range(ca_min..ca_min * 2), overlap);
        let new = |random: &mut SmallRng| Replica {
            jitter: random.random(),
            next_look: START + random.random_range(0..60),
            read: None,
            certificate: None,
        };
        Self {
            options: options(lifetimes),
            replicas: (0..3).map(|_| new(&mut random)).collect(),
            random,
            secret: empty(),
            version: 0,
            now: START,
            published: Default::default(),
            copy: empty(),
            away_until: 0,
            refuses_until: 0,
            steps: Vec::new(),
            must_verify: true,
        }
    }

    fn look_interval(&mut self) -> u64 {
        let lifetimes = self.options.lifetimes;
        let interval = lifetimes.certificate.min(lifetimes.overlap).as_secs() / 20;
        self.random.random_range(interval / 2..interval)
    }

    /// The apiserver goes away, or refuses a ConfigMap, for half of an overlap at most. A replica
    /// restarts, and knows nothing then.
    fn disturb(&mut self) {
        let lifetimes = self.options.lifetimes;
        let max = (lifetimes.certificate / 6).min(lifetimes.overlap / 2).as_secs();
        let until = self.now + self.random.random_range(0..max);
        let number = self.random.random_range(0..self.replicas.len());
        match self.random.random_range(0..40) {
            0 if self.now > self.away_until + max => self.away_until = until,
            1 if self.now > self.refuses_until + max => self.refuses_until = until,
            2 => {
                self.replicas[number].read = None;
                self.replicas[number].certificate = None;
            }
            _ => {}
        }
    }

    fn look(&mut self, number: usize) {
        for _ in 0..4 {
            if self.now < self.away_until {
                return;
            }
            let now = self.now;
            let version = self.version;
            if self.replicas[number].read.as_ref().is_none_or(|(read, _)| *read != version) {
                let material = Material::read(&self.secret, &self.options.dns_names, now);
                self.replicas[number].read = Some((version, material));
            }
            let material = self.replicas[number].read.as_ref().map(|(_, material)| material.clone()).unwrap();
            let mut is_published = false;
            if let Some((certified, facts)) = material.certified() {
                let certificate = (certified.cert[0].clone(), facts.not_after);
                self.must_verify |= self.replicas[number].certificate.as_ref() != Some(&certificate);
                self.replicas[number].certificate = Some(certificate);
                is_published = self.publish(&material);
            }
            let jitter = self.replicas[number].jitter;
            let step = next_step(&material.state, is_published, now, &self.options.lifetimes, jitter);
            if step == RenewalAction::Keep {
                return;
            }
            material.apply(step, &mut self.secret, &self.options, now).unwrap();
            self.version += 1;
            self.steps.push(step);
        }
    }

    fn publish(&mut self, material: &Material) -> bool {
        let refused = [false, self.now < self.refuses_until];
        self.must_verify |= !refused[1] && fill(&mut self.copy, &material.part(Stored::Copy));
        let bundle = &material.bundle();
        let mut have_all = true;
        for (published, refused) in self.published.iter_mut().zip(refused) {
            let has = published.back().is_some_and(|(_, last)| last == bundle);
            have_all &= has || !refused;
            if !has && !refused {
                published.push_back((self.now, bundle.to_owned()));
                self.must_verify = true;
            }
        }
        have_all
    }

    /// Each client that has read a ConfigMap at most one overlap ago accepts each replica, and each
    /// node, which has the copy.
    fn check(&mut self) {
        let since = self.now - self.options.lifetimes.overlap.as_secs();
        for published in &mut self.published {
            while published.len() > 1 && published[1].0 <= since {
                published.pop_front();
            }
        }
        let mut served: Vec<_> = self.replicas.iter().map(|replica| replica.certificate.clone()).collect();
        if self.must_verify && self.copy["data"].is_object() {
            let node = Material::read(&self.copy, &self.options.dns_names, self.now).certified();
            let (certified, facts) = node.expect("the certificate of nodes can be used");
            served.push(Some((certified.cert[0].clone(), facts.not_after)));
        }
        for (number, certificate) in served.iter().enumerate() {
            let Some((certificate, not_after)) = certificate else { continue };
            assert!(self.now <= *not_after, "the certificate of {number} has expired");
            if !self.must_verify {
                continue;
            }
            for (at, bundle) in self.published.iter().flatten() {
                let server = KeyUsage::server_auth;
                let accepted = accepts(bundle, certificate, server(), NAME, self.now);
                assert!(accepted, "{number} at {}, by a bundle of {at}: {:?}", self.now - START, self.steps);
            }
        }
        self.must_verify = false;
    }
}

#[test]
fn each_client_that_read_the_ca_at_most_one_overlap_ago_accepts_each_replica_for_years() {
    for seed in 0..12 {
        let mut world = World::new(seed);
        let end = START + 3 * world.options.lifetimes.ca.as_secs();
        while world.now < end {
            let number = (0..3).min_by_key(|number| world.replicas[*number].next_look).unwrap();
            world.now = world.replicas[number].next_look;
            world.disturb();
            world.look(number);
            world.check();
            world.replicas[number].next_look += world.look_interval();
        }
        let count = |step: RenewalAction| world.steps.iter().filter(|done| **done == step).count();
        assert_eq!(
            count(RenewalAction::CreateCa),
            1,
            "seed {seed}: one CA at the start, and never again without notice"
        );
        assert!(count(RenewalAction::SwitchToNextCa) >= 2, "seed {seed}: {:?}", world.steps);
        assert!(world.steps.len() < 200, "seed {seed}: {:?}", world.steps);
        assert!(world.copy["data"].is_object(), "seed {seed}");
    }
}

#[test]
fn a_ca_lives_through_its_states_in_order() {
    let options = options(days(90, 3 * 365, 30));
    let mut secret = empty();
    let at = |day: u64| START + day * DAY;
    assert_eq!(settle(&mut secret, &options, at(0)), [RenewalAction::CreateCa]);
    assert_eq!(settle(&mut secret, &options, at(59)), []);
    let mut done = Vec::new();
    let mut bundles = Vec::new();
    for day in 60..1100 {
        done.extend(settle(&mut secret, &options, at(day)).into_iter().map(|step| (day, step)));
        let cas = Material::read(&secret, &options.dns_names, at(day)).state.cas.len();
        if bundles.last().is_none_or(|(_, last)| *last != cas) {
            bundles.push((day, cas));
        }
    }
    let of =
        |step: RenewalAction| done.iter().filter(|(_, found)| *found == step).map(|(day, _)| *day).collect::<Vec<_>>();
    assert_eq!(of(RenewalAction::CreateNextCa), [945], "150 days before the end: 90 and twice 30");
    assert_eq!(of(RenewalAction::RecordPublication), [945]);
    assert_eq!(of(RenewalAction::SwitchToNextCa), [975]);
    assert_eq!(bundles, [(60, 1), (945, 2), (1095, 1)], "the old CA stays until its end");
    assert_eq!(of(RenewalAction::CreateCa), Vec::<u64>::new());
    let renewals = done.iter().filter(|(_, step)| matches!(step, RenewalAction::RenewCertificate(_))).count();
    assert_eq!(renewals, 18, "every 60 days");
}

#[test]
fn a_next_ca_that_was_never_published_signs_only_when_nothing_else_is_left() {
    let lifetimes = days(90, 3 * 365, 30);
    let end = START + lifetimes.ca.as_secs();
    let ca = |id: &str, created, not_after| CaFacts { id: id.to_owned(), created, not_after, has_key: true };
    let at_of = |made: u64, now: u64| {
        let cas = vec![ca("a", START, end), ca("b", made, made + lifetimes.ca.as_secs())];
        let leaf = Ok(LeafFacts { created: now, not_after: end });
        next_step(&SecretContents { cas, leaf, published: None }, false, now, &lifetimes, 0.0)
    };
    let at = |now: u64| at_of(START + 945 * DAY, now);
    assert_eq!(at(end - 31 * DAY), RenewalAction::Keep, "not published, so it waits");
    assert_eq!(at(end - 29 * DAY), RenewalAction::SwitchToNextCa, "a third of a certificate's life is left");
    let late = |left: u64| at_of(end - 20 * DAY, end - left * DAY);
    assert_eq!(late(20), RenewalAction::Keep, "made a moment ago, so no client knows it");
    assert_eq!(late(11), RenewalAction::Keep);
    assert_eq!(late(10), RenewalAction::SwitchToNextCa, "half of what was left has passed");
}

#[test]
fn a_certificate_that_no_client_would_accept_is_not_written() {
    use base64::{Engine, prelude::BASE64_STANDARD};
    use rcgen::{BasicConstraints, CertificateParams, GeneralSubtree, IsCa, KeyPair, NameConstraints};
    let options = options(days(90, 3 * 365, 30));
    let key = KeyPair::generate().unwrap();
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let permitted_subtrees = vec![GeneralSubtree::DnsName("other.example".to_owned())];
    ca.name_constraints = Some(NameConstraints { permitted_subtrees, excluded_subtrees: Vec::new() });
    let mut secret = empty();
    secret["data"] = json!({
        "ca.crt": BASE64_STANDARD.encode(ca.self_signed(&key).unwrap().pem()),
        "ca.key": BASE64_STANDARD.encode(key.serialize_pem()),
    });
    let before = secret.clone();
    let material = Material::read(&secret, &options.dns_names, START);
    let step = next_step(&material.state, true, START, &options.lifetimes, 0.0);
    assert!(matches!(step, RenewalAction::RenewCertificate(_)), "{step:?}");
    assert!(material.apply(step, &mut secret, &options, START).is_err());
    assert_eq!(secret, before);
}

#[test]
fn foreign_changes_of_the_secret_are_mended_and_only_a_lost_ca_is_replaced() {
    let options = options(days(90, 3 * 365, 30));
    let mut good = empty();
    settle(&mut good, &options, START);
    let ca = |secret: &Value| secret["data"]["ca.crt"].clone();
    let foreign = {
        let ca = issue::ca(START, START + 100 * DAY).unwrap();
        let names = [NAME.to_owned()];
        issue::certificate(&ca.certificate, &ca.key, &names, Usage::Server, START, START + DAY).unwrap()
    };
    let encode = |text: &str| {
        use base64::{Engine, prelude::BASE64_STANDARD};
        json!(BASE64_STANDARD.encode(text))
    };
    type Harm<'a> = (&'a str, Box<dyn Fn(&mut Value) + 'a>, bool);
    let harms: [Harm<'_>; 9] = [
        ("no data", Box::new(|secret| secret["data"] = Value::Null), false),
        ("no CA", Box::new(|secret| secret["data"]["ca.crt"] = json!("")), false),
        ("no key of the CA", Box::new(|secret| secret["data"]["ca.key"] = json!("")), false),
        ("rubbish in the CA", Box::new(|secret| secret["data"]["ca.crt"] = json!("%%%")), false),
        ("another CA", Box::new(|secret| secret["data"]["ca.crt"] = encode(&foreign.certificate)), false),
        ("no certificate", Box::new(|secret| secret["data"]["tls.crt"] = json!("")), true),
        ("half a key", Box::new(|secret| secret["data"]["tls.key"] = json!("LS0tLS1CRUdJTg==")), true),
        ("another key", Box::new(|secret| secret["data"]["tls.key"] = encode(&foreign.key.0)), true),
        (
            "another certificate with its key",
            Box::new(|secret| {
                secret["data"]["tls.crt"] = encode(&foreign.certificate);
                secret["data"]["tls.key"] = encode(&foreign.key.0);
            }),
            true,
        ),
    ];
    for (what, harm, keeps_ca) in harms {
        let mut secret = good.clone();
        harm(&mut secret);
        let harmed = Material::read(&secret, &options.dns_names, START + DAY);
        // Without the CA's key, the certificate is as good as before.
        assert_eq!(harmed.certified().is_none(), what != "no key of the CA", "{what}");
        let steps = settle(&mut secret, &options, START + DAY);
        assert_eq!(steps.len(), 1, "{what}: {steps:?}");
        assert_eq!(ca(&secret) == ca(&good), keeps_ca, "{what}: {steps:?}");
        let mended = Material::read(&secret, &options.dns_names, START + DAY);
        let (certified, _) = mended.certified().unwrap();
        let server = KeyUsage::server_auth();
        assert!(accepts(&mended.bundle(), &certified.cert[0], server, NAME, START + DAY), "{what}");
    }
}

#[test]
fn replicas_that_want_different_names_do_not_replace_each_others_certificate() {
    let old = options(days(90, 3 * 365, 30));
    let new = ManagedOptions { dns_names: vec![NAME.to_owned(), "new.example".to_owned()], ..old.clone() };
    let mut secret = empty();
    settle(&mut secret, &old, START);
    assert_eq!(settle(&mut secret, &new, START + 1).len(), 1);
    assert_eq!(settle(&mut secret, &old, START + 2), []);
    assert_eq!(settle(&mut secret, &new, START + 3), []);
    // The next regular renewal has only the names that its replica wants.
    settle(&mut secret, &new, START + 61 * DAY);
    let renewed = Material::read(&secret, &old.dns_names, START + 61 * DAY);
    assert!(renewed.certified().is_none());
}

#[test]
fn only_a_replica_has_a_certificate_for_peers() {
    let options = options(days(90, 3 * 365, 30));
    let mut secret = empty();
    settle(&mut secret, &options, START);
    let material = Material::read(&secret, &options.dns_names, START);
    let (serving, _) = material.certified().unwrap();
    let peer = material.peer_certificate(START, START + DAY).unwrap().unwrap();
    let peer = CertificateDer::from_pem_slice(peer.certificate.as_bytes()).unwrap();
    let bundle = material.bundle();
    for usage in [KeyUsage::client_auth, KeyUsage::server_auth] {
        assert!(accepts(&bundle, &peer, usage(), issue::PEER_NAME, START));
        assert!(!accepts(&bundle, &serving.cert[0], usage(), issue::PEER_NAME, START), "a node has that certificate");
    }
    assert!(!accepts(&bundle, &serving.cert[0], KeyUsage::client_auth(), NAME, START));
    assert!(!accepts(&bundle, &peer, KeyUsage::server_auth(), NAME, START), "it does not serve clients");
}

#[test]
fn a_copy_has_the_certificate_of_the_secret_and_never_a_key_of_a_ca() {
    use base64::{Engine, prelude::BASE64_STANDARD};
    let options = options(days(90, 3 * 365, 30));
    let mut secret = empty();
    let mut copy = empty();
    copy["data"] = json!({ "ca.key": "a2V5", "theirs": "dGhlaXJz" });
    assert!(Material::read(&secret, &options.dns_names, START).part(Stored::Copy).is_empty(), "nothing is written");
    for day in 0..1100 {
        settle(&mut secret, &options, START + day * DAY);
        let part = Material::read(&secret, &options.dns_names, START + day * DAY).part(Stored::Copy);
        fill(&mut copy, &part);
        assert!(!fill(&mut copy, &part), "it has it");
        let of = |object: &Value, key: &str| object["data"][key].as_str().unwrap().to_owned();
        for key in ["tls.crt", "tls.key", "ca.crt"] {
            assert_eq!(of(&copy, key), of(&secret, key), "day {day}");
        }
        let keys: Vec<_> = copy["data"].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["ca.crt", "theirs", "tls.crt", "tls.key"], "a CA's key that was there is removed");
        let pem = |object: &Value, key: &str| BASE64_STANDARD.decode(of(object, key)).unwrap();
        let ca_keys = String::from_utf8(pem(&secret, "ca.key")).unwrap();
        let copied = String::from_utf8(pem(&copy, "tls.key")).unwrap();
        let mut lines = ca_keys.lines().filter(|line| !line.starts_with("-----"));
        assert!(!lines.any(|line| copied.contains(line)), "day {day}");
    }
}

#[test]
fn no_text_has_a_key() {
    let issued = issue::ca(START, START + DAY).unwrap();
    assert!(!format!("{issued:?}").contains("PRIVATE"));
}
