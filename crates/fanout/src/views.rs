//! Views: the parts that equal subscriptions share.

pub mod index;
pub mod log;
pub mod log_bytes;
pub mod log_run;
pub mod plain_position;
pub mod segment;
pub mod segments;
pub mod selected_objects;
pub mod selections;
pub mod shared_lists;
pub mod shared_snapshot;
pub mod value_table;
pub mod view;
pub mod view_gap;
pub(crate) mod view_set;
