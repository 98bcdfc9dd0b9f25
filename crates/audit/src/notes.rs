//! Notes about a request while it is answered: its caller, its target, and the verdict.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kubefan_access::{Authorized, Caller, Denial, Read, ReadVerb, authorization::attributes::Attributes};
use kubefan_telemetry::traces::RequestSpan;

use super::{
    event::{ObjectRef, User, shortened},
    request_head::URI_BYTES_MAX,
};

/// The notes of one request. Clones are the same notes. They keep nothing if
/// nothing is recorded or traced.
#[derive(Clone, Default)]
pub struct Notes(Option<Arc<Mutex<Noted>>>);

/// The notes so far.
#[derive(Default)]
pub(super) struct Noted {
    caller: Option<Caller>,
    read: Option<Read>,
    query: Vec<(&'static str, String)>,
    /// Whether the read is allowed, and why.
    pub(super) decision: Option<(bool, Arc<str>)>,
    /// Objects and bytes that were sent.
    pub(super) sent: Option<(usize, usize)>,
}

impl Notes {
    pub(super) fn new() -> Self {
        Self(Some(Arc::default()))
    }

    /// Whether anything is kept.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    pub(super) fn lock(&self) -> Option<MutexGuard<'_, Noted>> {
        Some(self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes the caller.
    pub fn caller(&self, caller: &Caller) {
        if let Some(mut noted) = self.lock() {
            noted.caller = Some(caller.clone());
        }
    }

    /// Notes the read.
    pub fn read(&self, read: &Read) {
        if let Some(mut noted) = self.lock() {
            noted.read = Some(read.clone());
        }
    }

    /// Notes a parameter of a gRPC request that is a part of the query of its HTTP equivalent.
    /// Empty ones are left out.
    pub fn parameter(&self, name: &'static str, value: impl ToString) {
        if let Some(mut noted) = self.lock() {
            noted.query.push((name, value.to_string()));
        }
    }

    /// Notes the verdict.
    pub fn decided(&self, verdict: &Result<Authorized<Read>, Denial>) {
        if let Some(mut noted) = self.lock() {
            noted.decision = match verdict {
                Ok(authorized) => Some((true, authorized.reason().clone())),
                Err(Denial::Forbidden(forbidden)) => Some((false, forbidden.reason.as_str().into())),
                // There was no verdict.
                Err(_) => None,
            };
        }
    }

    /// Adds objects and bytes that are sent.
    pub fn sent(&self, objects: usize, bytes: usize) {
        if let Some(mut noted) = self.lock() {
            let (all_objects, all_bytes) = noted.sent.unwrap_or_default();
            noted.sent = Some((all_objects + objects, all_bytes + bytes));
        }
    }
}

impl Noted {
    /// Sets the attributes of a span: the target of the read, and the verdict. It has no names of
    /// objects or users, and no selectors: a reader of traces need not be allowed to read the audit
    /// log.
    pub(super) fn trace(&self, span: &RequestSpan) {
        if let Some(object) = self.object().map(ObjectRef::shortened) {
            span.note("k8s.resource.group", object.api_group);
            span.note("k8s.resource.name", object.resource);
            let scope = if object.namespace.is_empty() { "cluster" } else { "namespace" };
            span.note("k8s.resource.scope", scope);
            span.note("k8s.namespace.name", object.namespace);
        }
        if let Some((is_allowed, _)) = &self.decision {
            span.note("kubefan.authorization.decision", if *is_allowed { "allow" } else { "forbid" });
        }
    }

    /// The user; empty if it is not known. If a forwarded request's callers are not distinguished
    /// here, only the apiserver knows it.
    pub(super) fn user(&self, is_forwarded: bool) -> User<'_> {
        match &self.caller {
            Some(Caller::Known(known)) => User::from(&known.identity),
            Some(Caller::Any) if !is_forwarded => User::unsecured(),
            _ => User::default(),
        }
    }

    /// The object of the read, as the apiserver's authorizers see it.
    pub(super) fn object(&self) -> Option<ObjectRef> {
        let Attributes { group, version, resource, namespace, name, .. } = self.read.as_ref()?.attributes_for_record();
        let subresource = String::new();
        Some(ObjectRef { resource, namespace, name, api_group: group, api_version: version, subresource })
    }

    /// The path and the query of the same request over HTTP. `None` if the full name of its
    /// resource is not known.
    pub(super) fn http_equivalent(&self) -> Option<String> {
        let read = self.read.as_ref().filter(|read| read.has_full_name())?;
        let target = read.target();
        let mut uri = if target.group.is_empty() { "/api".to_owned() } else { format!("/apis/{}", target.group) };
        uri += &format!("/{}", target.version);
        if !target.namespace.is_empty() {
            uri += &format!("/namespaces/{}", target.namespace);
        }
        uri += &format!("/{}", target.resource);
        let mut query = self.query.clone();
        match read.verb() {
            ReadVerb::Get => uri += &format!("/{}", target.name),
            ReadVerb::List | ReadVerb::Watch => {
                query.push(("fieldSelector", read.field_selector().into_owned()));
                query.push(("labelSelector", read.spec().texts().labels.clone()));
            }
        }
        if read.verb() == ReadVerb::Watch {
            query.push(("watch", "true".to_owned()));
        }
        query.retain(|(_, value)| !value.is_empty());
        // As Go's `url.Values.Encode` does.
        query.sort();
        if !query.is_empty() {
            let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish();
            uri += &format!("?{query}");
        }
        Some(shortened(uri, URI_BYTES_MAX))
    }
}
