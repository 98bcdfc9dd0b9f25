//! The projection flags of `get` and `watch`.

use clap::{Args, ValueEnum};

use kubefan_client::{Parts, Projection};

#[derive(Debug, Args)]
#[command(next_help_heading = "Projection")]
pub(super) struct ProjectionArgs {
    /// The parts of each object to request
    #[arg(long, value_enum, value_name = "PARTS", default_value_t = PartsArg::Full, hide_default_value = true)]
    projection: PartsArg,

    /// Request only these fields, such as spec.nodeName,metadata.labels,spec.containers.image; a
    /// backslash escapes a dot in a name: 'metadata.annotations.example\.com/name'
    #[arg(long, value_name = "PATH,…", value_delimiter = ',', conflicts_with = "projection")]
    fields: Vec<String>,

    /// Leave out metadata.managedFields and metadata.resourceVersion
    #[arg(long)]
    drop_managed_fields: bool,

    /// Leave out the annotation kubectl.kubernetes.io/last-applied-configuration
    #[arg(long)]
    drop_last_applied: bool,

    /// Leave out changes that do not affect the requested parts
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
    /// Whether a field or a part of it is requested.
    pub(super) fn includes(&self, path: &str) -> bool {
        let within = |path: &str, other: &str| path.strip_prefix(other).is_some_and(|rest| rest.starts_with('.'));
        match (self.projection, self.fields.as_slice()) {
            (PartsArg::Full, []) => true,
            (PartsArg::Metadata, []) => within(path, "metadata"),
            (_, fields) => fields.iter().any(|field| field == path || within(path, field) || within(field, path)),
        }
    }

    pub(super) fn projection(&self) -> Projection {
        let parts = match self.projection {
            _ if !self.fields.is_empty() => Parts::Fields(self.fields.clone()),
            PartsArg::Metadata => Parts::Metadata,
            PartsArg::Full => Parts::Full,
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
    fn only_requested_fields_count_as_requested() {
        let includes = |flags: &[&str], path: &str| {
            Only::try_parse_from([&["kubefan"], flags].concat()).unwrap().args.includes(path)
        };
        let node = "spec.nodeName";
        let phase = "status.phase";
        assert!(includes(&[], node) && !includes(&["--projection=metadata"], node));
        for (fields, included) in
            [("spec", true), (node, true), ("spec.nodeName.x", true), ("spec.node", false), (phase, false)]
        {
            assert_eq!(includes(&["--fields", fields], node), included, "{fields}");
        }
        assert!(includes(&["--fields=spec.containers,status"], phase));
    }
}
