//! `kubefan get`: prints objects from the cache as `kubectl get` does.

use std::{
    io::{BufWriter, Write, stdout},
    time::Duration,
};

use clap::Args;
use tokio::time::{Instant, sleep};
use tonic::Code;

use super::{
    error::{CliError, describe},
    output::{self, Format},
    projection::ProjectionArgs,
    select::{SelectArgs, ServerArgs, is_cluster_scoped},
    table::{PodColumns, Table},
    visible::print_notice,
    watch::{NOT_SYNCED_DELAY_MAX, Notices, waiting_for},
};
use kubefan_client::{
    Client, ClientError, Event, ObjectList, ReadOptions, ResolvedResource, Target, WatchItem, WatchOptions,
    grpc::Object,
};

/// kubefan lists a resource upstream when it is first requested. The command waits this long for
/// that.
const FILL_TIMEOUT: Duration = Duration::from_secs(15);

/// Print objects from kubefan's cache
#[derive(Debug, Args)]
pub(super) struct GetArgs {
    // Not a doc comment: rustdoc would take the brackets for a link.
    #[arg(
        required = true,
        value_name = "TYPE [NAME]",
        help = "TYPE[,TYPE], TYPE NAME… or TYPE/NAME…; a type by any name that kubectl accepts"
    )]
    what: Vec<String>,

    /// Output format [default: a table]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,

    /// After the list, also print changes
    #[arg(short, long)]
    watch: bool,

    /// Require a state that is not older than this resource version
    #[arg(long, value_name = "VERSION", default_value = "", hide_default_value = true)]
    resource_version: String,

    /// Include metadata.managedFields in JSON and YAML
    #[arg(long)]
    show_managed_fields: bool,

    #[command(flatten)]
    projection: ProjectionArgs,

    #[command(flatten)]
    select: SelectArgs,

    #[command(flatten)]
    server: ServerArgs,
}

/// The result of one request.
struct Found {
    target: Target,
    resource: ResolvedResource,
    resource_version: String,
    cluster: String,
    objects: Vec<Object>,
}

pub(super) async fn run(args: GetArgs) -> Result<(), CliError> {
    let selected = args.select.parse(&args.what)?;
    if args.watch && (selected.len() > 1 || selected.iter().any(|one| one.names.len() > 1)) {
        return Err(CliError::Plain("--watch takes a single type or a single name".to_owned()));
    }
    if args.projection.only_changes && !args.watch {
        return Err(CliError::Plain("--only-changes needs --watch".to_owned()));
    }
    let read = ReadOptions {
        resource_version: args.resource_version.clone(),
        projection: args.projection.projection(),
        ..ReadOptions::default()
    };
    let client = args.server.connect().await?;
    let mut found = Vec::new();
    let mut failed = false;
    for one in &selected {
        let targets: Vec<Target> = match one.names.as_slice() {
            [] => vec![args.select.target(&one.resource, None)],
            names => names.iter().map(|name| args.select.target(&one.resource, Some(name))).collect(),
        };
        for target in targets {
            match fetch(&client, target, &read).await {
                Ok(one) => found.push(one),
                // As in kubectl, a missing object does not stop the others.
                Err(error @ ClientError::Status(_)) => {
                    print_notice(&describe(&error));
                    failed = true;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    let mut printer = Printer::new(&args, selected.len() > 1);
    printer.print_found(&found)?;
    match found.pop() {
        Some(one) if args.watch && !failed => follow(&client, one, &args.projection, &mut printer).await?,
        _ => {}
    }
    if failed { Err(CliError::Printed) } else { Ok(()) }
}

/// Lists or gets, and waits for a cache that is being filled. It does not wait for a resource
/// version, because kubefan itself has waited for that.
async fn fetch(client: &Client, mut target: Target, read: &ReadOptions) -> Result<Found, ClientError> {
    let deadline = Instant::now() + FILL_TIMEOUT;
    let mut is_waiting = false;
    loop {
        let result = fetch_once(client, target.clone(), read.clone()).await;
        match result {
            Err(error) if is_cluster_scoped(&error, &target) => target.namespace.clear(),
            Err(error) if error.code() == Code::Unavailable && !error.is_resource_version_too_large() => {
                match error.retry_after() {
                    Some(delay) if Instant::now() + delay < deadline => {
                        if !std::mem::replace(&mut is_waiting, true) {
                            print_notice(&waiting_for(&target.resource, &error));
                        }
                        sleep(delay).await;
                    }
                    _ => return Err(error),
                }
            }
            result => return result,
        }
    }
}

async fn fetch_once(client: &Client, target: Target, read: ReadOptions) -> Result<Found, ClientError> {
    if target.name.is_empty() {
        let list = client.list(target.clone(), read).await?;
        let resource = list.resource.unwrap_or_default();
        let ObjectList { resource_version, cluster, objects, .. } = list;
        return Ok(Found { target, resource, resource_version, cluster, objects });
    }
    let response = client.get(target.clone(), read).await?;
    Ok(Found {
        target,
        resource: response.resource.unwrap_or_default(),
        resource_version: response.resource_version,
        cluster: response.cluster,
        objects: response.object.into_iter().collect(),
    })
}

async fn follow(
    client: &Client,
    found: Found,
    projection: &ProjectionArgs,
    printer: &mut Printer,
) -> Result<(), CliError> {
    let options = WatchOptions {
        resource_version: found.resource_version,
        cluster: found.cluster,
        projection: projection.projection(),
        only_changes: projection.only_changes,
        not_synced_delay_max: Some(NOT_SYNCED_DELAY_MAX),
        ..WatchOptions::default()
    };
    let resource = found.target.resource.clone();
    let mut notices = Notices::default();
    let mut watch = client.watch(found.target, options);
    while let Some(item) = watch.next().await {
        match item? {
            WatchItem::Event(event) => printer.print_changed(&found.resource, object(event))?,
            other => {
                if let Some(line) = notices.line(&resource, &other) {
                    print_notice(&line);
                }
            }
        }
    }
    Ok(())
}

fn object(event: Event) -> Object {
    let Event { namespace, name, uid, resource_version, object, .. } = event;
    Object { namespace, name, uid, resource_version, object }
}

struct Printer {
    format: Option<Format>,
    managed_fields: bool,
    watching: bool,
    /// Whether a single object was requested by name.
    single: bool,
    namespace: String,
    several_types: bool,
    pods: PodColumns,
    table: Option<Table>,
    out: BufWriter<std::io::Stdout>,
}

impl Printer {
    fn new(args: &GetArgs, several_types: bool) -> Self {
        let names = if args.what[0].contains('/') { args.what.len() } else { args.what.len() - 1 };
        Self {
            format: args.output,
            managed_fields: args.show_managed_fields,
            watching: args.watch,
            single: names == 1,
            namespace: args.select.namespace().to_owned(),
            several_types,
            pods: PodColumns::of(&args.projection),
            table: None,
            out: BufWriter::new(stdout()),
        }
    }

    fn print_found(&mut self, found: &[Found]) -> Result<(), CliError> {
        match self.format {
            None => self.print_tables(found)?,
            Some(Format::Name) => self.print_each(found, Format::Name)?,
            // With --watch the output has no end, so it cannot be one List.
            Some(format) if self.watching || self.single => self.print_each(found, format)?,
            Some(format) => {
                let objects = found.iter().flat_map(|one| &one.objects);
                output::print_list(&mut self.out, format, objects, self.managed_fields)?;
            }
        }
        Ok(self.out.flush()?)
    }

    fn print_each(&mut self, found: &[Found], format: Format) -> Result<(), CliError> {
        for one in found {
            for object in &one.objects {
                output::print_object(&mut self.out, format, &one.resource, object, self.managed_fields)?;
            }
        }
        Ok(())
    }

    fn print_tables(&mut self, found: &[Found]) -> Result<(), CliError> {
        let mut printed: Option<&ResolvedResource> = None;
        for one in found.iter().filter(|one| !one.objects.is_empty()) {
            if printed != Some(&one.resource) {
                if printed.is_some() {
                    writeln!(self.out)?;
                }
                self.table = Some(self.new_table(&one.resource));
            }
            printed = Some(&one.resource);
            if let Some(table) = &mut self.table {
                table.print(&mut self.out, &one.objects, now())?;
            }
        }
        if printed.is_none()
            && !self.watching
            && let Some(one) = found.first()
        {
            match one.target.namespace.as_str() {
                "" => print_notice("No resources found"),
                namespace => print_notice(&format!("No resources found in {namespace} namespace.")),
            }
        }
        Ok(())
    }

    fn new_table(&self, resource: &ResolvedResource) -> Table {
        Table::new(resource, self.pods, self.namespace.is_empty(), self.several_types)
    }

    fn print_changed(&mut self, resource: &ResolvedResource, object: Object) -> Result<(), CliError> {
        match self.format {
            Some(format) => output::print_object(&mut self.out, format, resource, &object, self.managed_fields)?,
            None => {
                let mut table = self.table.take().unwrap_or_else(|| self.new_table(resource));
                table.print(&mut self.out, &[object], now())?;
                self.table = Some(table);
            }
        }
        Ok(self.out.flush()?)
    }
}

/// The current time, for the AGE column.
#[expect(clippy::disallowed_methods, reason = "the command line may read the wall clock")]
fn now() -> jiff::Timestamp {
    jiff::Timestamp::now()
}
