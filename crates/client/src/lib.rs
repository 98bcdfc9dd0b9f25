//! The client library: list and watch the objects that a kubefan serves. A watch reconnects by
//! itself and resumes where it was interrupted.
//!
//! ```no_run
//! # async fn example() -> Result<(), kubefan_client::ClientError> {
//! use kubefan_client::{ListWatch, Target, WatchItem, WatchOptions};
//!
//! let kubefan = ListWatch::connect("127.0.0.1:7443", &Default::default()).await?;
//! let pods = Target { resource: "pods".into(), label_selector: "app=web".into(), ..Default::default() };
//! let mut watch = kubefan.watch(pods, WatchOptions::default());
//! while let Some(item) = watch.next().await {
//!     if let WatchItem::Event(event) = item? {
//!         println!("{:?} {}/{}", event.r#type(), event.namespace, event.name);
//!     }
//! }
//! # Ok(()) }
//! ```

mod delta_base;
pub mod error;
pub mod list_watch;
pub mod projection;
pub mod watch;

pub use error::{ClientError, ServerStatus};
pub use list_watch::{ClientOptions, ListWatch, ObjectList, ReadOptions};
pub use projection::{Parts, Projection};
pub use watch::{OnExpired, OnLag, WatchItem, WatchOptions, WatchStream};

pub use kubefan_common::encoding::Encoding;
pub use kubefan_common::proto::v1alpha1::{Event, EventType, Object, ResolvedResource, ResourceStatus, Target};
