//! The records of transfers to peers in the audit log. A peer is named by the certificate that its
//! connection has proved.

use std::borrow::Cow;

use futures::future::BoxFuture;
use http::{HeaderMap, Uri};
use kubefan_access::{
    Caller,
    authentication::{caller::KnownCaller, certificate::subject},
};
use kubefan_audit::{AuditLog, AuditRecord, ObjectRef, Outcome, RequestHead};
use kubefan_peer::{CacheIdentity, TransferLog, TransferRecord};
use kubefan_telemetry::requests::Protocol;
use tonic::{Extensions, Status, transport::server::TlsConnectInfo};

use kubefan_server::{ClientInfo, grpc::audited::outcome};

const TRANSFER: &str = "/kubefan.v1alpha1.PeerService/Transfer";
const NOT_RECORDED: &str =
    "the transfer cannot be recorded in the audit log of this replica (--audit-log-mode=blocking-strict)";

/// Records transfers in the audit log.
pub(super) struct PeerRecords(pub(super) AuditLog);

struct OfTransfer(AuditRecord);

impl TransferLog for PeerRecords {
    fn begin(&self, of: &Extensions, wanted: &CacheIdentity) -> Box<dyn TransferRecord> {
        let info = of.get::<TlsConnectInfo<ClientInfo>>();
        let address = info.and_then(|info| info.get_ref().address).map(|address| address.ip());
        let object = ObjectRef {
            resource: wanted.gvr.resource.clone(),
            namespace: wanted.scope.namespace().to_owned(),
            api_group: wanted.gvr.group.clone(),
            api_version: wanted.gvr.version.clone(),
            ..ObjectRef::default()
        };
        let record = self.0.begin(RequestHead {
            protocol: Protocol::Grpc,
            verb: Cow::Borrowed("list"),
            uri: &Uri::from_static(TRANSFER),
            headers: &HeaderMap::new(),
            address,
            object: Some(object),
        });
        let chain = info.and_then(TlsConnectInfo::peer_certs);
        let holder = chain.as_ref().and_then(|chain| subject::holder(chain.first()?).ok());
        if let Some(identity) = holder {
            record.notes().caller(&Caller::Known(KnownCaller::new(identity, None)));
        }
        Box::new(OfTransfer(record))
    }
}

impl TransferRecord for OfTransfer {
    fn refused(&mut self, status: &Status) {
        self.0.refused(outcome(status));
    }

    fn started(&mut self) -> BoxFuture<'_, Result<(), Status>> {
        Box::pin(async {
            let started = self.0.started(Outcome::code(200), false).await;
            started.map_err(|_| Status::unavailable(NOT_RECORDED))
        })
    }
}
