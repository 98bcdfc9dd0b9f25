//! Lists and watches over HTTP: from a kube-apiserver, or from kubefan's Kubernetes API. Needs the
//! feature `http`.
//!
//! ```no_run
//! use kubefan_client::http::{HttpClient, HttpClientOptions, HttpListWatch, HttpListWatchOptions};
//! use kubefan_client::{ListOptions, ListerWatcher};
//!
//! # async fn example() -> Result<(), kubefan_client::ClientError> {
//! let client = HttpClient::new("http://127.0.0.1:7443", &HttpClientOptions::default()).await?;
//! let pods = HttpListWatch::new(client, "pods", HttpListWatchOptions::default())?;
//! let page = pods.list(ListOptions { limit: 500, ..ListOptions::default() }).await?;
//! println!("{} pods at version {}", page.objects.len(), page.resource_version);
//! # Ok(())
//! # }
//! ```

mod built_in;
mod cut;
mod discovery;
mod endpoint;
mod http_list_watch;
#[cfg(feature = "kubeconfig")]
mod kubeconfig;
mod lines;
mod metadata;
mod options;
mod reqwest_transport;
mod tls;
mod transport;
mod watch_events;

pub use endpoint::HttpClient;
pub use http_list_watch::{HttpListWatch, HttpListWatchOptions, HttpResource};
pub use options::HttpClientOptions;
pub use transport::{HttpResponse, HttpTransport};
