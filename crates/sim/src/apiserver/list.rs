//! LIST and GET at a resource version, and continue tokens.

use std::{ops::Bound, sync::Arc};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::{
    object::{Object, put_value},
    options::{self, ListOptions},
    protobuf,
    resource::SimResource,
    server::Inner,
    status::Status,
    store::{Collection, Snapshot},
};
use kubefan_model::ObjectKey;

/// Size at which a chunk of the response body is sent, in bytes. Large lists are streamed.
const CHUNK_BYTES: usize = 64 * 1024;

/// The result of a list.
pub(super) struct List {
    version: u64,
    items: Vec<Arc<Object>>,
    continue_token: String,
    remaining: Option<usize>,
}

/// The JSON inside a continue token, such as `{"v":"meta.k8s.io/v1","rv":75,"start":"/p-b\u0000"}`.
#[derive(Serialize, Deserialize)]
struct ContinueToken {
    v: String,
    #[serde(default)]
    rv: i64,
    #[serde(default)]
    start: String,
}

/// The objects in key order, starting at the name `from`. An empty namespace selects all objects,
/// and then `from` is a whole object key.
pub(super) fn scan<'a>(
    objects: &'a Snapshot,
    namespace: &'a str,
    from: &str,
) -> impl Iterator<Item = (&'a ObjectKey, &'a Arc<Object>)> + use<'a> {
    let prefix = if namespace.is_empty() { String::new() } else { format!("{namespace}/") };
    let start = format!("{prefix}{from}");
    let bounds = (Bound::Included(start.as_str()), Bound::Unbounded);
    let inside = move |key: &ObjectKey| namespace.is_empty() || key.namespace() == namespace;
    objects.range::<_, str>(bounds).take_while(move |(key, _)| inside(key))
}

impl Inner {
    /// Waits until the collection's state has reached `version`.
    pub(super) async fn wait_for(&self, collection: &Collection, version: u64) -> Result<(), Status> {
        if self.progress(collection) >= version {
            return Ok(());
        }
        if self.held.borrow().is_some_and(|held| held < version) {
            self.wait_for_caches().await;
            if let Some(held) = self.held.borrow().filter(|held| *held < version) {
                return Err(Status::too_large_version(version, held));
            }
        }
        let mut revisions = self.store.revisions();
        let reached = timeout(self.options.freshness_wait, revisions.wait_for(|revision| *revision >= version)).await;
        let current = self.store.make_consistent(collection);
        match reached {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Status::too_large_version(version, current)),
        }
    }

    /// Answers a LIST.
    pub(super) async fn list(
        &self,
        collection: &Collection,
        namespace: &str,
        options: &ListOptions,
    ) -> Result<List, Status> {
        let single = options.name().filter(|_| options.continue_token.is_empty());
        let single = single.filter(|_| !collection.resource.namespaced || !namespace.is_empty());
        let mut start = String::new();
        let (objects, version) = if options.continue_token.is_empty() {
            let requested = options::version(&options.resource_version)
                .map_err(|fault| Status::bad_request(format!("invalid resource version: {fault}")))?;
            let legacy_exact =
                options.version_match.is_empty() && options.limit > 0 && requested > 0 && single.is_none();
            if options.version_match == "Exact" || legacy_exact {
                self.wait_for(collection, requested).await?;
                let objects = collection.at(requested);
                let expired = || Status::expired("The resourceVersion for the provided list is too old.");
                (objects.ok_or_else(expired)?, requested)
            } else if options.resource_version.is_empty() {
                // A watch cache that does not get there in time is passed over: etcd answers.
                self.wait_for_caches().await;
                self.store.make_consistent(collection);
                collection.snapshot()
            } else {
                self.wait_for(collection, requested).await?;
                self.cached(collection)
            }
        } else {
            let token = decode(&options.continue_token)?;
            if !matches!(&*options.resource_version, "" | "0") {
                return Err(Status::bad_request("specifying resource version is not allowed when using continue"));
            }
            token.start.trim_start_matches('/').clone_into(&mut start);
            match u64::try_from(token.rv) {
                Ok(version) => {
                    self.wait_for(collection, version).await?;
                    let objects = collection.at(version);
                    let expired = || Status::expired_continue(encode(-1, start.clone()));
                    (objects.ok_or_else(expired)?, version)
                }
                Err(_) => {
                    self.store.make_consistent(collection);
                    collection.snapshot()
                }
            }
        };
        let limit = match usize::try_from(options.limit) {
            Ok(0) | Err(_) => usize::MAX,
            Ok(_) if options.resource_version == "0" => usize::MAX,
            Ok(limit) => limit,
        };
        if let Some(name) = single {
            let object = objects.get(&ObjectKey::new(namespace, name)).filter(|object| {
                self.counters.selector_tests.inc();
                object.matches(&collection.resource, &options.labels, &options.fields)
            });
            let items = object.into_iter().cloned().collect();
            return Ok(List { version, items, continue_token: String::new(), remaining: None });
        }
        Ok(self.page(&collection.resource, scan(&objects, namespace, &start), namespace, options, limit, version))
    }

    fn page<'a>(
        &self,
        resource: &SimResource,
        mut objects: impl Iterator<Item = (&'a ObjectKey, &'a Arc<Object>)>,
        namespace: &str,
        options: &ListOptions,
        limit: usize,
        version: u64,
    ) -> List {
        let mut list = List { version, items: Vec::new(), continue_token: String::new(), remaining: None };
        for (_, object) in objects.by_ref() {
            self.counters.selector_tests.inc();
            if object.matches(resource, &options.labels, &options.fields) {
                list.items.push(object.clone());
            }
            if list.items.len() >= limit {
                break;
            }
        }
        // As in kube-apiserver, the remaining objects are counted before the selectors are applied,
        // so a later page can be empty.
        let left = objects.count();
        if left > 0
            && let Some(last) = list.items.last()
        {
            let key = if namespace.is_empty() { last.key.as_str() } else { last.key.name() };
            let version = i64::try_from(version).unwrap_or(i64::MAX);
            list.continue_token = encode(version, format!("/{key}\0"));
            list.remaining = options.selects_everything().then_some(left);
        }
        list
    }

    /// Answers a GET of one object.
    pub(super) async fn get(
        &self,
        collection: &Collection,
        key: &ObjectKey,
        requested: &str,
    ) -> Result<Arc<Object>, Status> {
        let requested = options::version(requested).map_err(Status::internal)?;
        self.wait_for(collection, requested).await?;
        let gvr = &collection.resource.gvr;
        collection.get(key).ok_or_else(|| Status::not_found(&gvr.group, &gvr.resource, key.name()))
    }
}

impl List {
    /// Number of objects in the response.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// The object keys.
    pub(super) fn keys(&self) -> Vec<ObjectKey> {
        self.items.iter().map(|object| object.key.clone()).collect()
    }

    /// The response body in protobuf.
    pub(super) fn into_protobuf(self) -> Bytes {
        let items = self.items.iter().map(|object| &**object);
        protobuf::list(self.version, self.continue_token, self.remaining, items)
    }

    /// The response body, in chunks.
    pub(super) fn into_chunks(
        self,
        resource: &SimResource,
        metadata_only: bool,
    ) -> impl Iterator<Item = Bytes> + Send + use<> {
        let (head, tail) = self.envelope(resource, metadata_only);
        let mut items = self.items.into_iter();
        let mut head = Some(head);
        let mut tail = Some(tail);
        std::iter::from_fn(move || {
            let mut chunk = BytesMut::new();
            let first = head.take();
            let mut separate = first.is_none();
            chunk.put_slice(first.unwrap_or_default().as_bytes());
            for item in items.by_ref() {
                if separate {
                    chunk.put_u8(b',');
                }
                separate = true;
                if metadata_only {
                    item.put_metadata(&mut chunk)
                } else {
                    item.put_item(&mut chunk)
                }
                if chunk.len() >= CHUNK_BYTES {
                    return Some(chunk.freeze());
                }
            }
            chunk.put_slice(tail.take()?.as_bytes());
            Some(chunk.freeze())
        })
    }

    /// The JSON before and after the items.
    fn envelope(&self, resource: &SimResource, metadata_only: bool) -> (String, String) {
        let Self { version, continue_token, remaining, .. } = self;
        let (kind, api_version) = if metadata_only {
            ("PartialObjectMetadataList".to_owned(), "meta.k8s.io/v1".to_owned())
        } else {
            (resource.list_kind.clone(), resource.gvr.api_version())
        };
        let version = resource.versions.text(*version);
        if resource.custom && !metadata_only {
            let remaining = remaining.map(|n| format!(r#","remainingItemCount":{n}"#)).unwrap_or_default();
            let head = format!(r#"{{"apiVersion":"{api_version}","items":["#);
            let metadata = format!(r#"{{"continue":"{continue_token}"{remaining},"resourceVersion":"{version}"}}"#);
            return (head, format!("],\"kind\":\"{kind}\",\"metadata\":{metadata}}}\n"));
        }
        let mut metadata = format!(r#"{{"resourceVersion":"{version}""#);
        if !continue_token.is_empty() {
            metadata += &format!(r#","continue":"{continue_token}""#);
        }
        if let Some(remaining) = remaining {
            metadata += &format!(r#","remainingItemCount":{remaining}"#);
        }
        let head = format!(r#"{{"kind":"{kind}","apiVersion":"{api_version}","metadata":{metadata}}},"items":["#);
        (head, "]}\n".to_owned())
    }
}

fn encode(version: i64, start: String) -> String {
    let mut json = Vec::new();
    put_value(&mut json, &ContinueToken { v: "meta.k8s.io/v1".to_owned(), rv: version, start });
    BASE64_URL_SAFE_NO_PAD.encode(json)
}

fn decode(token: &str) -> Result<ContinueToken, Status> {
    let invalid =
        |why: String| Status::bad_request(format!("invalid continue token: continue key is not valid: {why}"));
    let json = BASE64_URL_SAFE_NO_PAD.decode(token).map_err(|error| {
        let at = match error {
            base64::DecodeError::InvalidByte(at, _) => at,
            _ => token.len(),
        };
        invalid(format!("illegal base64 data at input byte {at}"))
    })?;
    let token: ContinueToken = serde_json::from_slice(&json).map_err(|error| invalid(error.to_string()))?;
    if token.v != "meta.k8s.io/v1" {
        return Err(invalid(format!("server does not recognize this encoded version {}", token.v)));
    }
    if token.rv == 0 {
        return Err(invalid("incorrect encoded start resourceVersion (version meta.k8s.io/v1)".into()));
    }
    if token.start.is_empty() {
        return Err(invalid("encoded start key empty (version meta.k8s.io/v1)".into()));
    }
    let path = token.start.strip_prefix('/').unwrap_or(&token.start);
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(invalid(token.start));
    }
    Ok(token)
}
