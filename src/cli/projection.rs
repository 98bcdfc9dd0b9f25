//! What of each object `get` and `watch` ask for, as flags.

use clap::{Args, ValueEnum};

use crate::client::{Parts, Projection};

#[derive(Debug, Args)]
#[command(next_help_heading = "Projection")]
pub(super) struct ProjectionArgs {
    /// What of each object to ask for
    #[arg(long, value_enum, value_name = "PARTS", default_value_t = PartsArg::Full, hide_default_value = true)]
    projection: PartsArg,

    /// Only these fields, such as spec.nodeName,metadata.labels,spec.containers.image; write \\. for a dot in a name
    #[arg(long, value_name = "PATH,…", value_delimiter = ',', conflicts_with = "projection")]
    fields: Vec<String>,

    /// Leave out metadata.managedFields and metadata.resourceVersion
    #[arg(long)]
    drop_managed_fields: bool,

    /// Leave out what `kubectl apply` keeps in an annotation
    #[arg(long)]
    drop_last_applied: bool,

    /// Leave out changes of what is not asked for
    #[arg(long)]
    pub(super) only_changes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartsArg {
    /// Everything
    Full,
    /// The metadata
    Metadata,
}

impl ProjectionArgs {
    pub(super) fn projection(&self) -> Projection {
        let parts = match (self.projection, self.fields.is_empty()) {
            (_, false) => Parts::Fields(self.fields.clone()),
            (PartsArg::Metadata, true) => Parts::Metadata,
            (PartsArg::Full, true) => Parts::Full,
        };
        let Self { drop_managed_fields, drop_last_applied, .. } = *self;
        Projection { parts, drop_managed_fields, drop_last_applied }
    }
}
