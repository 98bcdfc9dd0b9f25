//! The audit log: all reads with their callers and answers, in the form of kube-apiserver (`Event`
//! of audit.k8s.io/v1, level Metadata), one JSON object per line.
//!
//! The hazard is an answer without a record. So a request gets its [`AuditRecord`] where it
//! begins, and the record completes itself when it is dropped: after the answer, a disconnect, a
//! drain or a panic. The second hazard is a log that delays or stops the service, so records are
//! queued, and one task writes them.
//!
//! - [`event`]: the JSON of a record.
//! - [`request_head`]: the head of a request, within limits.
//! - [`notes`]: notes about a request while it is answered.
//! - [`queue`]: from the requests to the writer.
//! - [`record`]: one request, from its start to its end.
//! - [`log_writer`]: the task that writes, and tries again.
//! - [`log_file`]: the file, and how it is rotated.
//! - [`audit_log`]: the parts together.

pub mod audit_log;
pub mod event;
pub mod log_file;
pub mod log_writer;
pub mod notes;
pub mod queue;
pub mod record;
pub mod request_head;

pub use audit_log::{AuditLog, AuditWriter, Parts};
pub use event::{ObjectRef, Outcome};
pub use notes::Notes;
pub use queue::NotRecorded;
pub use record::AuditRecord;
pub use request_head::RequestHead;
