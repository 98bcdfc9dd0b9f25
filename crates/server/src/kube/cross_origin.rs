//! Lets pages of other sites read kubefan's own answers, if the apiserver would (CORS).
//!
//! A browser shows a page of another site only answers with the `Access-Control-*` headers that
//! allow its origin. kube-apiserver writes them for the origins of `--cors-allowed-origins`, so
//! forwarded answers have them. For its own answers and refusals kubefan asks the apiserver once
//! per origin, and keeps the answer for a minute.
//!
//! The hazard is that any client can name any origin. So nothing is evicted for a new origin: each
//! has a place, in fair shares, until it expires, and without a place it is not asked about.
//! Origins whose requests were only refused have places of their own.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use kubefan_admission::{FairPermit, FairPool, Holder};
use kubefan_upstream::Upstream;
use tokio::{sync::Mutex as AsyncMutex, time::Instant};

use super::{
    answer::{Answer, FromUpstream},
    header_values::put,
};
use crate::{client_info::ClientInfo, watch::OpenedWatch};

/// The longest origin that is asked about, in bytes. A host name has up to 253.
const ORIGIN_BYTES_MAX: usize = 300;
/// Maximum origins that are known at a time, of each kind.
const ORIGINS_MAX: usize = 128;
/// Time for which an answer counts. A change of the apiserver's flag shows after this time.
const ANSWER_AGE_MAX: Duration = Duration::from_secs(60);
/// Pause after a failure before the apiserver is asked again. The last answer counts meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Time for which an allowed origin is remembered after its last request, so that its pages can
/// read the cache while the apiserver is down.
const UNUSED_MAX: Duration = Duration::from_secs(10 * 60);

/// The origins that the apiserver was asked about.
pub struct AllowedOrigins {
    upstream: Upstream,
    known: Mutex<HashMap<Box<[u8]>, Known>>,
    /// For origins of requests that were answered from a cache.
    places_of_readers: Arc<FairPool>,
    /// For all other origins.
    places_of_others: Arc<FairPool>,
}

/// An origin that has a place.
struct Known {
    answer: Arc<AsyncMutex<OriginAnswer>>,
    used_at: Instant,
    _place: FairPermit,
}

/// The apiserver's last answer about an origin. Locked while it is asked.
struct OriginAnswer {
    /// Empty if pages of the origin may not read.
    headers: Arc<HeaderMap>,
    /// Time at which it is asked again.
    ask_at: Instant,
}

/// The parts of a request that names an origin.
pub struct CorsRequest {
    origin: HeaderValue,
    holder: Holder,
    is_preflight: bool,
}

impl CorsRequest {
    /// `None` if the request names no origin, or one that is too long to be one.
    pub fn of(request: &Request<Body>) -> Option<Self> {
        let origin = origin_of(request.headers())?;
        let client = request.extensions().get::<ClientInfo>();
        Some(Self {
            origin: origin.clone(),
            holder: client.map_or(Holder::new(0, None), ClientInfo::holder),
            is_preflight: request.method() == Method::OPTIONS,
        })
    }
}

/// Returns the origin that a request names.
pub fn origin_of(headers: &HeaderMap) -> Option<&HeaderValue> {
    headers.get(header::ORIGIN).filter(|origin| !origin.is_empty() && origin.len() <= ORIGIN_BYTES_MAX)
}

/// The caller whose share an origin counts to.
#[derive(Debug, Clone, Copy)]
pub struct Asker {
    /// The connection that named the origin.
    pub holder: Holder,
    /// Whether kubefan has answered its request, and not refused it.
    pub is_served: bool,
}

impl AllowedOrigins {
    /// Asks `upstream`.
    pub fn new(upstream: Upstream) -> Self {
        let places = || FairPool::new(ORIGINS_MAX);
        Self { upstream, known: Mutex::default(), places_of_readers: places(), places_of_others: places() }
    }

    /// Lets the page that sent a request read the answer, if the apiserver would. A preflight that
    /// upstream has not answered is answered as the apiserver does, so that pages can read the
    /// cache while it is down, and with a profile that forwards nothing.
    pub async fn permit(&self, page: CorsRequest, answer: Answer) -> Answer {
        let CorsRequest { origin, holder, is_preflight } = page;
        let is_served = match &answer {
            Answer::Watch(_) => true,
            Answer::Response(response) | Answer::Forwarded(response) => {
                if response.extensions().get::<FromUpstream>().is_some() {
                    return answer;
                }
                response.status().is_success()
            }
        };
        let headers = self.headers(&origin, Asker { holder, is_served }).await;
        if headers.is_empty() {
            return answer;
        }
        match answer {
            Answer::Watch(opened) => Answer::Watch(Box::new(OpenedWatch { cross_origin: headers, ..*opened })),
            Answer::Response(_) | Answer::Forwarded(_) if is_preflight => {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = StatusCode::NO_CONTENT;
                put(&headers, response.headers_mut());
                Answer::Response(response)
            }
            Answer::Response(mut response) => {
                put(&headers, response.headers_mut());
                Answer::Response(response)
            }
            Answer::Forwarded(mut response) => {
                put(&headers, response.headers_mut());
                Answer::Forwarded(response)
            }
        }
    }

    /// Returns the headers that let pages of an origin read an answer; none if they may not, or if
    /// that is not known. Asks upstream if the last answer is too old.
    pub async fn headers(&self, origin: &HeaderValue, asker: Asker) -> Arc<HeaderMap> {
        let Some(answer) = self.known(origin, asker) else { return Arc::default() };
        let mut answer = answer.lock_owned().await;
        if Instant::now() < answer.ask_at {
            return answer.headers.clone();
        }
        let upstream = self.upstream.clone();
        let origin = origin.clone();
        // A task of its own keeps the answer even if the client hangs up at once. Otherwise each
        // request of such a client could cause one upstream.
        let asked = tokio::spawn(async move {
            match upstream.cross_origin_headers(&origin).await {
                Ok(headers) => {
                    *answer = OriginAnswer { headers: Arc::new(headers), ask_at: Instant::now() + ANSWER_AGE_MAX };
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot ask which origins may read");
                    answer.ask_at = Instant::now() + RETRY_INTERVAL;
                }
            }
            answer.headers.clone()
        });
        asked.await.unwrap_or_default()
    }

    /// Finds the answer about an origin. A new one takes a place; `None` if there is none for it.
    fn known(&self, origin: &HeaderValue, asker: Asker) -> Option<Arc<AsyncMutex<OriginAnswer>>> {
        let now = Instant::now();
        let mut all = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(origin.as_bytes()) {
            known.used_at = now;
            return Some(known.answer.clone());
        }
        all.retain(|_, known| known.is_needed(now));
        let places = if asker.is_served { &self.places_of_readers } else { &self.places_of_others };
        let place = places.try_take(Some(asker.holder))?;
        let answer = Arc::new(AsyncMutex::new(OriginAnswer { headers: Arc::default(), ask_at: now }));
        all.insert(origin.as_bytes().into(), Known { answer: answer.clone(), used_at: now, _place: place });
        Some(answer)
    }
}

impl Known {
    /// Whether its answer counts, or may still be of use.
    fn is_needed(&self, now: Instant) -> bool {
        // The lock is held while upstream is asked.
        let Ok(answer) = self.answer.try_lock() else { return true };
        now < answer.ask_at || (!answer.headers.is_empty() && now < self.used_at + UNUSED_MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    };

    use bytes::Bytes;
    use http::Uri;
    use http_body_util::{BodyExt, Full};
    use kubefan_upstream::client::UpstreamOptions;
    use tower::{BoxError, service_fn, util::BoxCloneSyncService};

    use super::*;

    const DASHBOARD: HeaderValue = HeaderValue::from_static("https://dash.example");

    /// An apiserver that allows every origin of `dash.example`.
    #[derive(Default)]
    struct Apiserver {
        asked: AtomicUsize,
        is_down: AtomicBool,
    }

    impl Apiserver {
        fn origins(self: &Arc<Self>) -> AllowedOrigins {
            let this = self.clone();
            let service = service_fn(move |request: Request<Bytes>| {
                this.asked.fetch_add(1, Ordering::Relaxed);
                let is_down = this.is_down.load(Ordering::Relaxed);
                async move {
                    if is_down {
                        return Err(BoxError::from(std::io::Error::from(std::io::ErrorKind::ConnectionRefused)));
                    }
                    let origin = request.headers()[header::ORIGIN].clone();
                    let body = Full::new(Bytes::from("{}")).map_err(|never: Infallible| match never {}).boxed_unsync();
                    let mut response = Response::new(body);
                    if origin.to_str().unwrap().ends_with("dash.example") {
                        response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
                    }
                    Ok(response)
                }
            });
            let base = Uri::from_static("https://sim.local:6443");
            let service = BoxCloneSyncService::new(service);
            AllowedOrigins::new(Upstream::from_service(service, &base, UpstreamOptions::default()))
        }

        fn asked(&self) -> usize {
            self.asked.swap(0, Ordering::Relaxed)
        }
    }

    fn asker(connection: u64, is_served: bool) -> Asker {
        let address = std::net::Ipv4Addr::from_bits(u32::try_from(connection).unwrap()).into();
        Asker { holder: Holder::new(connection, Some(address)), is_served }
    }

    fn numbered(number: usize) -> HeaderValue {
        HeaderValue::try_from(format!("https://{number}.example")).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn upstream_is_asked_once_a_minute_per_origin() {
        let apiserver = Arc::new(Apiserver::default());
        let origins = apiserver.origins();
        for (origin, is_allowed) in [(DASHBOARD, true), (numbered(1), false)] {
            let ask = || origins.headers(&origin, asker(1, true));
            let all = futures::future::join_all((0..9).map(|_| ask())).await;
            assert!(all.iter().all(|headers| headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN) == is_allowed));
            assert_eq!(apiserver.asked(), 1, "all that wait share the answer");
            tokio::time::advance(ANSWER_AGE_MAX).await;
            assert_eq!(ask().await.is_empty(), !is_allowed);
            assert_eq!(apiserver.asked(), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_takes_no_permission_away_and_costs_few_requests() {
        let apiserver = Arc::new(Apiserver::default());
        let origins = apiserver.origins();
        origins.headers(&DASHBOARD, asker(1, true)).await;
        apiserver.is_down.store(true, Ordering::Relaxed);
        apiserver.asked();
        for _ in 0..20 {
            tokio::time::advance(ANSWER_AGE_MAX).await;
            assert!(!origins.headers(&DASHBOARD, asker(1, true)).await.is_empty());
            assert!(!origins.headers(&DASHBOARD, asker(1, true)).await.is_empty());
            // A new origin removes expired ones.
            assert!(origins.headers(&numbered(2), asker(2, false)).await.is_empty());
        }
        assert!(apiserver.asked() <= 40, "a failure counts for a while");
        tokio::time::advance(UNUSED_MAX).await;
        origins.headers(&numbered(3), asker(2, false)).await;
        assert!(!origins.known.lock().unwrap().contains_key(DASHBOARD.as_bytes()), "nobody asks any more");
    }

    #[tokio::test(start_paused = true)]
    async fn origins_of_strangers_are_bounded_and_take_no_place_of_others() {
        let apiserver = Arc::new(Apiserver::default());
        let origins = apiserver.origins();
        origins.headers(&DASHBOARD, asker(1, false)).await;
        for number in 0..2_000 {
            origins.headers(&numbered(number), asker(2, false)).await;
        }
        assert!(apiserver.asked() < ORIGINS_MAX, "one stranger has a share of the places");
        let other = HeaderValue::from_static("https://other.dash.example");
        assert!(!origins.headers(&other, asker(3, false)).await.is_empty(), "a place is left for others");
        for number in 0..2_000 {
            origins.headers(&numbered(number), asker(number as u64, false)).await;
        }
        assert!(apiserver.asked() <= ORIGINS_MAX);
        let last = HeaderValue::from_static("https://last.dash.example");
        assert!(!origins.headers(&last, asker(4, true)).await.is_empty(), "readers have places of their own");
        apiserver.asked();
        assert!(!origins.headers(&DASHBOARD, asker(1, true)).await.is_empty());
        assert_eq!(apiserver.asked(), 0, "nothing was evicted");
        assert!(origins.known.lock().unwrap().len() <= 2 * ORIGINS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_hangs_up_costs_no_second_request() {
        let apiserver = Arc::new(Apiserver::default());
        let origins = apiserver.origins();
        for _ in 0..9 {
            // Polled once, and dropped.
            let _ = futures::FutureExt::now_or_never(origins.headers(&DASHBOARD, asker(1, true)));
        }
        assert!(!origins.headers(&DASHBOARD, asker(1, true)).await.is_empty());
        assert_eq!(apiserver.asked(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn only_answers_of_kubefan_itself_are_changed() {
        let origins = Arc::new(Apiserver::default()).origins();
        let page = |method: &Method, origin: &str| {
            let request = Request::builder().method(method).header(header::ORIGIN, origin).body(Body::empty());
            CorsRequest::of(&request.unwrap())
        };
        let permit = async |method: Method, origin: &str, from_upstream: bool| {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            if from_upstream {
                response.extensions_mut().insert(FromUpstream);
            }
            match origins.permit(page(&method, origin).unwrap(), Answer::Forwarded(response)).await {
                Answer::Response(response) | Answer::Forwarded(response) => {
                    (response.status().as_u16(), response.headers().contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN))
                }
                Answer::Watch(_) => unreachable!(),
            }
        };
        assert_eq!(permit(Method::GET, "https://dash.example", false).await, (503, true));
        assert_eq!(permit(Method::GET, "https://dash.example", true).await, (503, false));
        assert_eq!(permit(Method::GET, "https://evil.example", false).await, (503, false));
        assert_eq!(permit(Method::OPTIONS, "https://dash.example", false).await, (204, true));
        assert_eq!(permit(Method::OPTIONS, "https://dash.example", true).await, (503, false));
        assert_eq!(permit(Method::OPTIONS, "https://evil.example", false).await, (503, false));
        assert!(page(&Method::GET, "").is_none());
        assert!(page(&Method::GET, &"x".repeat(ORIGIN_BYTES_MAX + 1)).is_none());
    }
}
