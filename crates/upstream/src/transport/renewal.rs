//! A client whose settings are read again while it is in use: a CA, a client certificate or another
//! credential may have been replaced.
//!
//! The files that the settings name are compared before a request, at most once per
//! [`LOOK_INTERVAL`], so that usually no request meets the old ones. If the server refuses the
//! client or its certificate is not trusted, they are compared at once. Settings outside of files,
//! such as the credentials of a plugin, are read again at most once per [`REFUSED_INTERVAL`],
//! because every refused request asks for that. Settings that cannot be used never replace those in
//! use.

use std::{
    collections::hash_map::DefaultHasher,
    fmt::Display,
    fs,
    hash::{Hash, Hasher},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use futures::future::BoxFuture;
use tokio::time::{Instant, timeout};

/// The minimum time between two looks at the files without a reason.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// The minimum time between two reads after refusals if no file has changed.
const REFUSED_INTERVAL: Duration = Duration::from_secs(30);
/// Time that a request waits for another one that reads. A credential plugin may take long.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// The files that settings name, as they were.
#[derive(Debug)]
pub(crate) struct NamedFiles {
    paths: Vec<PathBuf>,
    /// A hash of their contents.
    fingerprint: u64,
}

impl NamedFiles {
    /// The files as they are now. Read them afterwards, so that a change in between shows.
    pub(crate) fn look(paths: Vec<PathBuf>) -> Self {
        let fingerprint = fingerprint(&paths);
        Self { paths, fingerprint }
    }

    /// The files as they are now, if one of them has other contents. Blocks: they are small.
    fn changed(&self) -> Option<Self> {
        let now = Self::look(self.paths.clone());
        (now.fingerprint != self.fingerprint).then_some(now)
    }
}

fn fingerprint(paths: &[PathBuf]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for path in paths {
        fs::read(path).ok().hash(&mut hasher);
    }
    hasher.finish()
}

/// Makes a client from its settings as they are now.
type Make<T, E> = Box<dyn Fn() -> BoxFuture<'static, Result<(T, NamedFiles), E>> + Send + Sync>;

/// A client, and how to make it again.
pub(crate) struct Renewed<T, E> {
    current: ArcSwap<T>,
    /// `None` if it never changes.
    source: Option<Source<T, E>>,
}

struct Source<T, E> {
    make: Make<T, E>,
    looked_at: Mutex<Instant>,
    /// Locked while the client is made again.
    files: tokio::sync::Mutex<ReadFiles>,
}

struct ReadFiles {
    files: NamedFiles,
    /// Time at which the settings were last read again.
    read_at: Option<Instant>,
}

impl<T, E: Display> Renewed<T, E> {
    /// A client that never changes.
    pub(crate) fn fixed(client: T) -> Self {
        Self { current: ArcSwap::from_pointee(client), source: None }
    }

    /// A client that `make` makes, now and after changes.
    ///
    /// # Errors
    /// If the first value cannot be made.
    pub(crate) async fn new(
        make: impl Fn() -> BoxFuture<'static, Result<(T, NamedFiles), E>> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        let (client, files) = make().await?;
        let files = tokio::sync::Mutex::new(ReadFiles { files, read_at: None });
        let source = Some(Source { make: Box::new(make), looked_at: Mutex::new(Instant::now()), files });
        Ok(Self { current: ArcSwap::from_pointee(client), source })
    }

    /// The client as it was last made.
    pub(crate) fn last(&self) -> Arc<T> {
        self.current.load_full()
    }

    /// The client. If a file has changed, it is made again first.
    pub(crate) async fn current(&self) -> Arc<T> {
        if let Some(source) = &self.source
            && source.must_look()
            // Otherwise another request makes it again.
            && let Ok(mut read) = source.files.try_lock()
            && let Some(changed) = read.files.changed()
        {
            self.make_again(source, &mut read, Some(changed)).await;
        }
        self.last()
    }

    /// Makes the client again after the server has refused `used`, or was refused by it. Returns
    /// whether there is another one now.
    pub(crate) async fn refused(&self, used: &Arc<T>) -> bool {
        let Some(source) = &self.source else { return false };
        let Ok(mut read) = timeout(TURN_TIMEOUT, source.files.lock()).await else { return false };
        if !Arc::ptr_eq(used, &self.last()) {
            return true;
        }
        let has_waited = read.read_at.is_none_or(|read_at| read_at.elapsed() >= REFUSED_INTERVAL);
        let changed = read.files.changed();
        if changed.is_none() && !has_waited {
            return false;
        }
        self.make_again(source, &mut read, changed).await
    }

    async fn make_again(&self, source: &Source<T, E>, read: &mut ReadFiles, changed: Option<NamedFiles>) -> bool {
        let made = (source.make)().await;
        // A request that is dropped before leaves the turn to another.
        read.read_at = Some(Instant::now());
        match made {
            Ok((client, files)) => {
                read.files = files;
                self.current.store(Arc::new(client));
                true
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read the upstream settings again; the old ones stay in use");
                // These are not tried again.
                if let Some(changed) = changed {
                    read.files = changed;
                }
                false
            }
        }
    }
}

impl<T, E> Source<T, E> {
    /// Whether it is time to look at the files. The caller does so then.
    fn must_look(&self) -> bool {
        let now = Instant::now();
        let mut looked_at = self.looked_at.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(*looked_at) < LOOK_INTERVAL {
            return false;
        }
        *looked_at = now;
        true
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use tokio::time::advance;

    use super::*;

    /// Returns a client that is the content of its file.
    async fn of_file(path: &std::path::Path) -> Renewed<String, String> {
        let path = path.to_owned();
        let made = Renewed::new(move || {
            let path = path.clone();
            let make = async move {
                let files = NamedFiles::look(vec![path.clone()]);
                let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
                if text == "bad" { Err(text) } else { Ok((text, files)) }
            };
            make.boxed()
        });
        made.await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_file_is_read_before_a_request_and_a_bad_one_never_counts() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.crt");
        fs::write(&file, "first").unwrap();
        let client = of_file(&file).await;
        for (text, expected) in [("second", "second"), ("bad", "second"), ("third", "third")] {
            fs::write(&file, text).unwrap();
            advance(LOOK_INTERVAL).await;
            assert_eq!(*client.current().await, expected);
            let before = client.last();
            advance(LOOK_INTERVAL).await;
            assert!(Arc::ptr_eq(&before, &client.current().await), "without a change it stays");
        }
        fs::remove_file(&file).unwrap();
        advance(LOOK_INTERVAL).await;
        assert_eq!(*client.current().await, "third");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_dropped_loses_no_change() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.crt");
        fs::write(&file, "first").unwrap();
        let path = file.clone();
        let client = Renewed::<_, String>::new(move || {
            let path = path.clone();
            let make = async move {
                let files = NamedFiles::look(vec![path.clone()]);
                tokio::task::yield_now().await;
                Ok((fs::read_to_string(path).unwrap(), files))
            };
            make.boxed()
        });
        let client = client.await.unwrap();
        fs::write(&file, "second").unwrap();
        for _ in 0..3 {
            advance(LOOK_INTERVAL).await;
            assert!(client.current().now_or_never().is_none(), "it is read");
        }
        advance(LOOK_INTERVAL).await;
        assert_eq!(*client.current().await, "second");
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_refusal_a_changed_file_is_read_at_once_and_all_else_at_times() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.crt");
        fs::write(&file, "0").unwrap();
        let client = of_file(&file).await;
        for number in 1..9 {
            let used = client.current().await;
            fs::write(&file, number.to_string()).unwrap();
            assert!(client.refused(&used).await);
            assert!(client.refused(&used).await, "another request that used the old one, too");
            assert_eq!(*client.last(), number.to_string());
        }
        assert!(!client.refused(&client.last()).await);
        advance(REFUSED_INTERVAL).await;
        assert!(client.refused(&client.last()).await);
        assert!(!Renewed::<_, String>::fixed(1).refused(&Arc::new(1)).await);
    }
}
