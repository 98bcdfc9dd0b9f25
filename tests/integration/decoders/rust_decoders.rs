//! The decoders of Rust, in this process: kube-rs with its feature `gzip`, and the layer by which
//! reqwest decodes. reqwest's own feature would be on for kubefan's requests too.

use futures::TryStreamExt;
use http_body_util::{BodyExt, BodyStream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube_client::{
    Api, Client, Config, ResourceExt,
    api::{ListParams, WatchParams},
    config::AuthInfo,
    core::WatchEvent,
};
use tower::{ServiceExt, service_fn};
use tower_http::decompression::Decompression;

use super::decoder_reads::{End, Read, Report, Seen, Shared, digest, objects};

/// Access to the servers.
#[derive(Clone)]
pub(super) struct Access {
    pub(super) ca_der: Vec<u8>,
    pub(super) token: String,
    pub(super) http: reqwest::Client,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Starts the reads as tasks.
pub(super) fn start(is_kube_rs: bool, access: &Access, reads: &[Read]) -> Shared {
    let reports = Shared::default();
    for read in reads {
        let access = access.clone();
        let read = read.clone();
        let reports = reports.clone();
        tokio::spawn(async move {
            let ended = if is_kube_rs {
                over_kube_rs(&access, &read, &reports).await
            } else {
                over_reqwest(&access, &read, &reports).await
            };
            let (end, error) =
                ended.map_or_else(|error| (End::Error, chain(&*error)), |()| (End::Clean, String::new()));
            reports.lock().unwrap().push(Report::End { read: read.name.to_owned(), end, error });
        });
    }
    reports
}

fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn see(read: &Read, reports: &Shared, seen: Seen) {
    reports.lock().unwrap().push(Report::Object { read: read.name.to_owned(), seen });
}

async fn over_kube_rs(access: &Access, read: &Read, reports: &Shared) -> Result<(), Failure> {
    let mut config = Config::new(read.server.parse()?);
    config.root_cert = Some(vec![access.ca_der.clone()]);
    config.auth_info = AuthInfo { token: Some(access.token.clone().into()), ..AuthInfo::default() };
    let config_maps: Api<ConfigMap> = Api::namespaced(Client::try_from(config)?, &read.namespace);
    let see = |object: &ConfigMap| {
        let payload = object.data.as_ref().and_then(|data| data.get("payload"));
        let version = object.resource_version().unwrap_or_default();
        see(
            read,
            reports,
            Seen { name: object.name_any(), version, digest: digest(payload.map_or("", String::as_str)) },
        );
    };
    if read.is_list {
        config_maps.list(&ListParams::default().match_any()).await?.iter().for_each(see);
        return Ok(());
    }
    let mut params = WatchParams::default();
    if read.seconds > 0 {
        params = params.timeout(read.seconds);
    }
    let mut events = std::pin::pin!(config_maps.watch(&params, &read.version).await?);
    while let Some(event) = events.try_next().await? {
        match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) | WatchEvent::Deleted(object) => see(&object),
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(status) => return Err(format!("{status:?}").into()),
        }
    }
    Ok(())
}

async fn over_reqwest(access: &Access, read: &Read, reports: &Shared) -> Result<(), Failure> {
    let send = |request: http::Request<reqwest::Body>| async {
        let response = access.http.execute(request.try_into()?).await?;
        Ok::<_, Failure>(http::Response::<reqwest::Body>::from(response))
    };
    let request = http::Request::get(read.url()).body(reqwest::Body::default())?;
    let response = Decompression::new(service_fn(send)).oneshot(request).await?;
    if read.is_list {
        let body = response.into_body().collect().await?.to_bytes();
        objects(&serde_json::from_slice(&body)?, true).for_each(|seen| see(read, reports, seen));
        return Ok(());
    }
    let mut chunks = BodyStream::new(response.into_body());
    let mut received = Vec::new();
    while let Some(frame) = chunks.try_next().await? {
        received.extend_from_slice(&frame.into_data().unwrap_or_default());
        while let Some(end) = received.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = received.drain(..=end).collect();
            objects(&serde_json::from_slice(&line)?, false).for_each(|seen| see(read, reports, seen));
        }
    }
    Ok(())
}
