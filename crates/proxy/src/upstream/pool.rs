//! As many HTTP clients as the requests under way need connections.
//!
//! Over HTTP/2 a client has one connection, and a server takes only so many streams on it: the next request waits without a word until
//! one of them ends, which for a watch may be hours. What the server states as its limit is known to hyper alone, below reqwest, so the
//! limit here is a number that servers are known to take.

use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::BodyExt;
use reqwest::{Body, Client};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::BoxError;

use super::{
    connector,
    transport::{self, UpstreamBody},
};

/// Requests under way on one connection. What is left of its streams is for those that we have ended and the server has not.
const REQUESTS_MAX: usize = connector::STREAMS_MAX - 10;

type Make = dyn Fn() -> Result<Client, String> + Send + Sync;

/// Clients of one server. One more is made when all have enough to do; the first with room goes first, so that the others fall idle, and
/// then their connections close by themselves (reqwest's `pool_idle_timeout`).
pub(super) struct Pool {
    make: Box<Make>,
    members: Mutex<Vec<Member>>,
}

struct Member {
    client: Client,
    /// As many as it may have requests under way.
    places: Arc<Semaphore>,
}

impl Member {
    fn place(&self) -> Option<(Client, OwnedSemaphorePermit)> {
        Some((self.client.clone(), self.places.clone().try_acquire_owned().ok()?))
    }
}

impl Pool {
    /// A pool of clients that `make` makes, with the first.
    pub(super) fn new(make: impl Fn() -> Result<Client, String> + Send + Sync + 'static) -> Result<Self, String> {
        let pool = Self { make: Box::new(make), members: Mutex::default() };
        drop(pool.place()?);
        Ok(pool)
    }

    /// A client with room for one more request.
    fn place(&self) -> Result<(Client, OwnedSemaphorePermit), String> {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = members.iter().find_map(Member::place) {
            return Ok(place);
        }
        let member = Member { client: (self.make)()?, places: Arc::new(Semaphore::new(REQUESTS_MAX)) };
        let place = member.place().ok_or("a new client has no room")?;
        members.push(member);
        Ok(place)
    }

    /// Sends a request. It has its place until the body of its response is dropped.
    pub(super) async fn send(&self, request: http::Request<Body>) -> Result<http::Response<UpstreamBody>, BoxError> {
        let (client, place) = self.place()?;
        let response = http::Response::<Body>::from(client.execute(request.try_into()?).await?);
        Ok(response.map(|body| transport::holding(body.map_err(BoxError::from), place).boxed_unsync()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_more_client_is_made_only_when_all_have_enough_to_do() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let pool = Pool::new(|| Client::builder().no_proxy().build().map_err(|error| error.to_string())).unwrap();
        let made = || pool.members.lock().unwrap().len();
        let mut places: Vec<_> = (0..REQUESTS_MAX).map(|_| pool.place().unwrap()).collect();
        assert_eq!(made(), 1);
        places.push(pool.place().unwrap());
        assert_eq!(made(), 2);
        drop(places.remove(0));
        places.push(pool.place().unwrap());
        assert_eq!(made(), 2);
        let free = |member: usize| pool.members.lock().unwrap()[member].places.available_permits();
        assert_eq!((free(0), free(1)), (0, REQUESTS_MAX - 1), "the first with room is taken");
        drop(places);
        assert_eq!((free(0), free(1)), (REQUESTS_MAX, REQUESTS_MAX));
    }
}
