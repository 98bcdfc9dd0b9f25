//! Looks up the names of servers, and remembers the addresses for a time without a DNS server: a
//! cluster's DNS server may be on the node that has failed together with a replica of kubefan.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, LazyLock, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    net::lookup_host,
    time::{sleep, timeout},
};

/// The longest wait for a look-up if addresses of an earlier one are known. A resolver waits for
/// a server that is gone for 5 s. A connection to another kubefan may take 1 s with its look-up, so
/// most of that has to remain.
const LOOKUP_MAX: Duration = Duration::from_millis(300);
/// The mean time between two look-ups of a name. A connection may last for days. By then all
/// replicas that its look-up found may be gone, except the one it is connected to.
const REFRESH: Duration = Duration::from_secs(60);

/// The result of a look-up.
pub type LookUp<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// Finds the addresses of a server.
pub trait Resolve: Send + Sync {
    /// The addresses of `host`, a DNS name or an IP address, with the port to connect to.
    ///
    /// # Errors
    /// The name has no address, or cannot be looked up now.
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> LookUp<'a>;
}

/// Whether a host, perhaps in brackets, names this machine by `localhost` or by a loopback address.
pub fn is_loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    let address = host.parse().map(|address: IpAddr| address.to_canonical());
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// The system's resolver.
struct System;

impl Resolve for System {
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> LookUp<'a> {
        Box::pin(async move { Ok(lookup_host((host, port)).await?.collect()) })
    }
}

/// The names that clients look up, and their last known addresses. Names are of the clients'
/// settings, so there are few.
pub struct Names {
    resolver: Arc<dyn Resolve>,
    known: Mutex<HashMap<Name, Vec<SocketAddr>>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Name {
    host: String,
    port: u16,
}

impl Names {
    /// The names that the process looks up by the system's resolver. Clients that are built anew,
    /// with other credentials for example, know the addresses that those before them have found.
    pub fn of_system() -> Arc<Self> {
        static NAMES: LazyLock<Arc<Names>> = LazyLock::new(|| Names::new(Arc::new(System)));
        NAMES.clone()
    }

    /// Looks names up by `resolver`.
    pub fn new(resolver: Arc<dyn Resolve>) -> Arc<Self> {
        Arc::new(Self { resolver, known: Mutex::default() })
    }

    /// Looks up the addresses of a host. If that fails or takes longer than 300 ms, the result is
    /// that of the last look-up, and a late answer counts for the next call. From the first one on,
    /// a task looks the name up each minute, until the value is dropped.
    ///
    /// # Errors
    /// The name cannot be looked up, and no look-up before has found an address.
    pub async fn look_up(self: &Arc<Self>, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        let name = Name { host: host.to_owned(), port };
        let Some(known) = self.known().get(&name).cloned() else { return self.clone().find(name).await };
        let looked_up = tokio::spawn(self.clone().find(name));
        match timeout(LOOKUP_MAX, looked_up).await {
            Ok(Ok(Ok(found))) if !found.is_empty() => Ok(found),
            _ => Ok(known),
        }
    }

    async fn find(self: Arc<Self>, name: Name) -> io::Result<Vec<SocketAddr>> {
        let found = self.resolver.resolve(&name.host, name.port).await?;
        self.remember(name, &found);
        Ok(found)
    }

    fn remember(self: &Arc<Self>, name: Name, found: &[SocketAddr]) {
        if found.is_empty() {
            return;
        }
        match self.known().entry(name) {
            Entry::Occupied(mut known) => *known.get_mut() = found.to_vec(),
            Entry::Vacant(unknown) => {
                if unknown.key().host.parse::<IpAddr>().is_err() {
                    tokio::spawn(refresh(Arc::downgrade(self), unknown.key().clone()));
                }
                unknown.insert(found.to_vec());
            }
        }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<Name, Vec<SocketAddr>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks a name up again and again. Clients that started together do so at different times.
async fn refresh(names: Weak<Names>, name: Name) {
    loop {
        sleep(REFRESH.mul_f64(rand::random_range(0.5..1.5))).await;
        let Some(names) = names.upgrade() else { return };
        if let Ok(Ok(found)) = timeout(REFRESH, names.resolver.resolve(&name.host, name.port)).await {
            names.remember(name.clone(), &found);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;

    use super::*;

    const LATE: Duration = Duration::from_secs(5);

    #[derive(Debug, Clone)]
    enum Answer {
        Found(Vec<SocketAddr>),
        IsLate(Vec<SocketAddr>),
        Fails,
        IsSilent,
    }

    struct Scripted(Mutex<Answer>);

    impl Scripted {
        fn answers(&self, answer: Answer) {
            *self.0.lock().unwrap() = answer;
        }
    }

    impl Resolve for Scripted {
        fn resolve<'a>(&'a self, _: &'a str, _: u16) -> LookUp<'a> {
            let answer = self.0.lock().unwrap().clone();
            Box::pin(async {
                match answer {
                    Answer::Found(found) => Ok(found),
                    Answer::IsLate(found) => {
                        sleep(LATE).await;
                        Ok(found)
                    }
                    Answer::Fails => Err(io::ErrorKind::NotFound.into()),
                    Answer::IsSilent => pending().await,
                }
            })
        }
    }

    fn address(port: u16) -> Vec<SocketAddr> {
        vec![([127, 0, 0, 1], port).into()]
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_resolver_the_addresses_of_the_last_look_up_are_used() {
        let resolver = Arc::new(Scripted(Mutex::new(Answer::Fails)));
        let names = Names::new(resolver.clone());
        names.look_up("a", 1).await.unwrap_err();
        resolver.answers(Answer::Found(Vec::new()));
        assert_eq!(names.look_up("a", 1).await.unwrap(), []);
        resolver.answers(Answer::Found(address(1)));
        assert_eq!(names.look_up("a", 1).await.unwrap(), address(1));
        for answer in [Answer::Fails, Answer::Found(Vec::new()), Answer::IsSilent] {
            resolver.answers(answer.clone());
            assert_eq!(names.look_up("a", 1).await.unwrap(), address(1), "{answer:?}");
        }
        resolver.answers(Answer::Fails);
        names.look_up("b", 1).await.unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_comes_late_counts_for_the_next_connection() {
        let resolver = Arc::new(Scripted(Mutex::new(Answer::Found(address(1)))));
        let names = Names::new(resolver.clone());
        assert_eq!(names.look_up("a", 1).await.unwrap(), address(1));
        resolver.answers(Answer::IsLate(address(2)));
        let asked_at = Instant::now();
        assert_eq!(names.look_up("a", 1).await.unwrap(), address(1));
        assert_eq!(asked_at.elapsed(), LOOKUP_MAX, "most of the second for a connection remains");
        sleep(LATE).await;
        resolver.answers(Answer::Fails);
        assert_eq!(names.look_up("a", 1).await.unwrap(), address(2));
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_that_change_during_a_connection_are_known() {
        let resolver = Arc::new(Scripted(Mutex::new(Answer::Found(address(1)))));
        let names = Names::new(resolver.clone());
        assert_eq!(names.look_up("a", 1).await.unwrap(), address(1));
        resolver.answers(Answer::Found(address(2)));
        sleep(2 * REFRESH).await;
        resolver.answers(Answer::Fails);
        sleep(2 * REFRESH).await;
        assert_eq!(names.look_up("a", 1).await.unwrap(), address(2));
        drop(names);
        sleep(2 * REFRESH).await;
        assert_eq!(Arc::strong_count(&resolver), 1, "the task has ended");
    }
}
