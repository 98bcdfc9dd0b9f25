//! An apiserver that answers reviews only, for tests.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::{Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use serde_json::Value;
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

use kubefan_upstream::{
    Upstream, UpstreamError,
    client::{UpstreamBody, UpstreamOptions},
};

type Answer = dyn Fn(&Value) -> Value + Send + Sync;

/// Answers reviews by a function, and records them.
#[derive(Clone)]
pub(crate) struct FakeReviews {
    answer: Arc<Answer>,
    taken: Arc<Mutex<Vec<Value>>>,
    failure: Arc<Mutex<Option<UpstreamError>>>,
}

impl FakeReviews {
    /// `answer` gets the body of a review and returns the body of the answer.
    pub(crate) fn new(answer: impl Fn(&Value) -> Value + Send + Sync + 'static) -> Self {
        Self { answer: Arc::new(answer), taken: Arc::default(), failure: Arc::default() }
    }

    /// From now on every review fails like this; with `None` none does.
    pub(crate) fn fails_with(&self, failure: Option<UpstreamError>) {
        *self.failure.lock().unwrap() = failure;
    }

    /// The reviews since the last call.
    pub(crate) fn taken(&self) -> Vec<Value> {
        std::mem::take(&mut self.taken.lock().unwrap())
    }

    /// A client of it.
    pub(crate) fn upstream(&self) -> Upstream {
        let fake = self.clone();
        let service = service_fn(move |request: http::Request<Bytes>| {
            let answer = fake.answer(&request);
            async move { answer }
        });
        let base = Uri::from_static("https://sim.local:6443");
        Upstream::from_service(BoxCloneSyncService::new(service), &base, UpstreamOptions::default())
    }

    fn answer(&self, request: &http::Request<Bytes>) -> Result<Response<UpstreamBody>, BoxError> {
        let body: Value = serde_json::from_slice(request.body()).unwrap();
        self.taken.lock().unwrap().push(body.clone());
        let (code, message) = match &*self.failure.lock().unwrap() {
            None => (StatusCode::CREATED, None),
            Some(UpstreamError::Forbidden { message }) => (StatusCode::FORBIDDEN, Some(message.clone())),
            Some(UpstreamError::Server { .. }) => (StatusCode::SERVICE_UNAVAILABLE, Some(String::new())),
            Some(_) => return Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into()),
        };
        let text = message.unwrap_or_else(|| (self.answer)(&body).to_string());
        let body = Full::new(Bytes::from(text)).map_err(|never: Infallible| match never {}).boxed_unsync();
        Ok(Response::builder().status(code).body(body).unwrap())
    }
}
