//! The versions that a reader accepts, without a server.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use tonic::{Code, transport::Endpoint};

use super::*;
use crate::{ClientOptions, ObjectList, ServerStatus};

fn list_watch() -> GrpcListWatch {
    let channel = Endpoint::from_static("http://kubefan.test").connect_lazy();
    let client = Client::from_channel(channel, "kubefan.test", &ClientOptions::default());
    GrpcListWatch::new(client, Target::default(), WatchOptions::default())
}

fn expired(reason: &str) -> ClientError {
    ClientError::Status(Box::new(ServerStatus {
        code: Code::OutOfRange,
        reason: reason.to_owned(),
        metadata: Default::default(),
        message: String::new(),
        field: String::new(),
        retry_after: None,
    }))
}

#[tokio::test]
async fn a_snapshot_after_an_expired_version_does_not_go_back_in_time() {
    let source = list_watch();
    assert_eq!(source.check_state("5"), Ok(()), "there is no minimum for the first one");
    source.ended(&expired("RESOURCE_VERSION_TOO_OLD"), "369");
    let error = source.check_state("278").unwrap_err();
    assert!(error.is_unreachable() && !error.is_expired(), "{error}");
    assert!(error.to_string().contains("at version 278, behind version 369"), "{error}");
    assert_eq!(source.check_state("406"), Ok(()));
    assert_eq!(source.check_state("278"), Ok(()), "only the expired version is a minimum");
}

/// The server has no minimum for a list after a list that it could not serve.
#[tokio::test]
async fn a_list_after_an_expired_version_does_not_go_back_in_time() {
    let source = list_watch();
    let list = |version: &str| ObjectList { resource_version: version.to_owned(), ..ObjectList::default() };
    source.ended(&expired("RESOURCE_VERSION_TOO_OLD"), "281");
    let error = source.page(list("217")).unwrap_err();
    assert!(error.is_unreachable() && !error.is_expired(), "{error}");
    assert_eq!(source.page(list("281")).unwrap().resource_version, "281");
}

#[tokio::test]
async fn versions_may_go_back_in_another_history() {
    let source = list_watch();
    source.ended(&expired("RESOURCE_VERSION_TOO_OLD"), "369");
    source.ended(&expired("HISTORY_REWRITTEN"), "369");
    assert_eq!(source.check_state("12"), Ok(()));
    // A restored cluster may refuse the old version as too old, too.
    source.ended(&expired("RESOURCE_VERSION_TOO_OLD"), "369");
    let refused = std::iter::repeat_with(|| source.check_state("12")).take_while(Result::is_err).count();
    assert_eq!(refused, OLD_SNAPSHOTS_MAX as usize);
}
