//! A pool of HTTP clients that grows with the number of concurrent requests.
//!
//! Over HTTP/2 a client has one connection, and the server limits the streams on it. A request
//! beyond the limit waits silently until another one ends, which for a watch may take hours. Only
//! hyper, below reqwest, knows the server's limit, so this pool uses a number that servers are
//! known to accept.

use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::BodyExt;
use reqwest::{Body, Client, Request, Response};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};
use tower::BoxError;

use crate::transport::{
    connection::{self, REQUESTS_MAX, UpstreamBody},
    unprocessed,
};

type ClientFactory = dyn Fn() -> Result<Client, String> + Send + Sync;

/// Clients of one server. A new client is created when all are full. The first client with a free
/// permit is used, so that the later ones fall idle and their connections close (reqwest's
/// `pool_idle_timeout`).
pub(crate) struct Pool {
    create: Box<ClientFactory>,
    members: Mutex<Vec<Member>>,
}

struct Member {
    client: Client,
    /// One permit per concurrent request.
    permits: Arc<Semaphore>,
}

impl Member {
    fn try_acquire(&self) -> Option<(Client, OwnedSemaphorePermit)> {
        Some((self.client.clone(), self.permits.clone().try_acquire_owned().ok()?))
    }
}

impl Pool {
    /// A pool of clients that `create` creates, starting with one.
    pub(crate) fn new(create: impl Fn() -> Result<Client, String> + Send + Sync + 'static) -> Result<Self, String> {
        let pool = Self { create: Box::new(create), members: Mutex::default() };
        drop(pool.acquire()?);
        Ok(pool)
    }

    /// A client with a free permit.
    fn acquire(&self) -> Result<(Client, OwnedSemaphorePermit), String> {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(acquired) = members.iter().find_map(Member::try_acquire) {
            return Ok(acquired);
        }
        let member = Member { client: (self.create)()?, permits: Arc::new(Semaphore::new(REQUESTS_MAX)) };
        let acquired = member.try_acquire().ok_or("a new client has no free permit")?;
        members.push(member);
        Ok(acquired)
    }

    /// Sends a request, and again if the server has certainly not read it. It occupies a permit
    /// until the body of its response is dropped.
    pub(crate) async fn send(&self, request: http::Request<Body>) -> Result<http::Response<UpstreamBody>, BoxError> {
        let (client, permit) = self.acquire()?;
        let response = http::Response::<Body>::from(execute(&client, request.try_into()?).await?);
        Ok(response.map(|body| connection::holding(body.map_err(BoxError::from), permit).boxed_unsync()))
    }
}

async fn execute(client: &Client, request: Request) -> Result<Response, reqwest::Error> {
    for delay in unprocessed::DELAYS {
        // A body that is streamed cannot be sent again.
        let Some(attempt) = request.try_clone() else { break };
        match client.execute(attempt).await {
            Err(error) if unprocessed::is_unprocessed(&error) => sleep(delay).await,
            done => return done,
        }
    }
    client.execute(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_added_only_when_all_are_full() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let pool = Pool::new(|| Client::builder().no_proxy().build().map_err(|error| error.to_string())).unwrap();
        let created = || pool.members.lock().unwrap().len();
        let mut permits: Vec<_> = (0..REQUESTS_MAX).map(|_| pool.acquire().unwrap()).collect();
        assert_eq!(created(), 1);
        permits.push(pool.acquire().unwrap());
        assert_eq!(created(), 2);
        drop(permits.remove(0));
        permits.push(pool.acquire().unwrap());
        assert_eq!(created(), 2);
        let free = |member: usize| pool.members.lock().unwrap()[member].permits.available_permits();
        assert_eq!((free(0), free(1)), (0, REQUESTS_MAX - 1), "the first client with a free permit is used");
        drop(permits);
        assert_eq!((free(0), free(1)), (REQUESTS_MAX, REQUESTS_MAX));
    }
}
