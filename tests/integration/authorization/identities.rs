//! The callers of the tests: tokens of users and service accounts, and client certificates.

use std::collections::BTreeMap;

use rcgen::{DnType, ExtendedKeyUsagePurpose};

use crate::harness::pki::{self, Authority, IssuedPem};

/// The callers. `NS` is the namespace of the test, `OTHER` another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Who {
    /// A member of system:masters.
    Admin,
    /// A user without any role.
    Stranger,
    /// No credentials.
    Anonymous,
    /// A token that means nothing.
    Invalid,
    /// May list and watch pods and configmaps of the whole cluster, and get none.
    Lister,
    /// May get, list and watch pods and configmaps in NS.
    Own,
    /// May only list pods in NS.
    ListOnly,
    /// May get, list and watch the configmap `one` in NS.
    Named,
    /// May list configmaps in NS by its group, as a service account of OTHER.
    ByGroup,
    /// The rights of Own, with the token of the pod `bound`.
    BoundToPod,
    /// The rights of Own, with the token of the pod `barred`.
    Barred,
    /// A service account with the token of a pod that is gone.
    BoundToGone,
    /// May get the namespace NS by a role in it.
    Inside,
    /// May list deployments of the whole cluster.
    Apps,
    /// May get, list and watch pods and configmaps in NS, by the name in its client certificate.
    Cert,
    /// The user of Cert, whose certificate is of an intermediate CA.
    CertOfChain,
    /// May list configmaps in NS, by the group in its client certificate.
    CertGroup,
    /// A member of system:masters by its client certificate.
    CertMaster,
    /// A user without any role, by its client certificate.
    CertStranger,
    /// A member of system:masters by a certificate of a CA with the name of the right one.
    CertForeign,
    /// A member of system:masters by a certificate that has expired.
    CertExpired,
    /// A member of system:masters by a certificate for servers.
    CertServer,
    /// A member of system:masters without a name.
    CertNameless,
    /// A member of system:masters whose certificate has an empty uid.
    CertEmptyUid,
}

/// The pods whose tokens callers have.
pub(super) const PODS: [(Who, &str); 3] =
    [(Who::BoundToPod, "bound"), (Who::Barred, "barred"), (Who::BoundToGone, "gone")];

pub(super) const SERVICE_ACCOUNTS: [(Who, &str); 7] = [
    (Who::Lister, "lister"),
    (Who::Own, "own"),
    (Who::ListOnly, "list-only"),
    (Who::Named, "named"),
    (Who::ByGroup, "by-group"),
    (Who::Inside, "inside"),
    (Who::Apps, "apps"),
];
use Who::{
    Cert, CertEmptyUid, CertExpired, CertForeign, CertGroup, CertMaster, CertNameless, CertOfChain, CertServer,
    CertStranger,
};

/// The client certificates of the callers that have one. A user or group with a role has the name
/// of the namespace.
pub(super) fn certificates(authority: &Authority, own: &str) -> BTreeMap<Who, IssuedPem> {
    let chain = authority.intermediate();
    let foreign = Authority::new();
    let mut of_chain = chain.client(own, "others");
    of_chain.certificate.push_str(&chain.ca_pem);
    let masters = |user: &str| pki::named(user, "system:masters");
    let clients = [ExtendedKeyUsagePurpose::ClientAuth];
    let mut expired = masters("expired");
    let mut no_uid = masters("no-uid");
    expired.not_before = rcgen::date_time_ymd(2001, 1, 1);
    expired.not_after = rcgen::date_time_ymd(2002, 1, 1);
    no_uid.distinguished_name.push(DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 57683, 2]), "");
    BTreeMap::from([
        (Cert, authority.client(own, "others")),
        (CertOfChain, of_chain),
        (CertGroup, authority.client("member", own)),
        (CertMaster, authority.client("master", "system:masters")),
        (CertStranger, authority.client("stranger", "strangers")),
        (CertForeign, foreign.client("master", "system:masters")),
        (CertExpired, authority.issue(expired, &clients)),
        (CertServer, authority.issue(masters("server"), &[ExtendedKeyUsagePurpose::ServerAuth])),
        (CertNameless, authority.issue(masters(""), &clients)),
        (CertEmptyUid, authority.issue(no_uid, &clients)),
    ])
}
