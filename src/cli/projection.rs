//! What of each object `get` and `watch` ask for, as flags.

use clap::{Args, ValueEnum};

use kubefan_client::{Parts, Projection};

#[derive(Debug, Args)]
#[command(next_help_heading = "Projection")]
pub(super) struct ProjectionArgs {
    /// What of each object to ask for
    #[arg(long, value_enum, value_name = "PARTS", default_value_t = PartsArg::Full, hide_default_value = true)]
    projection: PartsArg,

    /// Only these fields, such as spec.nodeName,metadata.labels,spec.containers.image; in quotes, \. is a dot in a name: 'metadata.annotations.example\.com/name'
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
    /// Whether a field is asked for, or a part of it.
    pub(super) fn asks_for(&self, path: &str) -> bool {
        let within = |path: &str, other: &str| path.strip_prefix(other).is_some_and(|rest| rest.starts_with('.'));
        match (self.projection, self.fields.as_slice()) {
            (PartsArg::Full, []) => true,
            (PartsArg::Metadata, []) => within(path, "metadata"),
            (_, fields) => fields.iter().any(|field| field == path || within(path, field) || within(field, path)),
        }
    }

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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: ProjectionArgs,
    }

    #[test]
    fn what_is_asked_for_is_told_from_what_is_not() {
        let asks = |flags: &[&str], path: &str| {
            Only::try_parse_from([&["kubefan"], flags].concat()).unwrap().args.asks_for(path)
        };
        let (node, phase) = ("spec.nodeName", "status.phase");
        assert!(asks(&[], node) && !asks(&["--projection=metadata"], node));
        for (fields, asked) in
            [("spec", true), (node, true), ("spec.nodeName.x", true), ("spec.node", false), (phase, false)]
        {
            assert_eq!(asks(&["--fields", fields], node), asked, "{fields}");
        }
        assert!(asks(&["--fields=spec.containers,status"], phase));
    }
}
