//! A shared informer with handlers as the piece of scripts.

use std::collections::HashMap;

use futures::{FutureExt, future::LocalBoxFuture};
use kubefan_client::{FilteredHandler, HandlerOptions, Registration, SharedInformer};
use serde_json::Value;
use tokio::sync::watch;

use crate::{
    handler::Recorder,
    object::{Thing, colors, format, format_all, mark, outcome, read},
    script::{Log, Piece, option, parse_duration},
    server::{Server, shown},
};

pub(crate) struct Informers {
    log: Log,
    running: Option<Running>,
    handlers: HashMap<String, Handler>,
    stop: watch::Sender<bool>,
}

struct Running {
    server: Server,
    informer: SharedInformer<Value>,
}

struct Handler {
    registration: Registration,
    release: watch::Sender<bool>,
}

impl Informers {
    pub(crate) fn new(log: &Log) -> Self {
        Self { log: log.clone(), running: None, handlers: HashMap::new(), stop: watch::channel(false).0 }
    }

    fn create(&self, arguments: &[&str]) -> Running {
        let server = Server::new(&self.log, arguments);
        let mut builder = SharedInformer::<Value>::builder(server.clone());
        if let Some(period) = option(arguments, "resync") {
            builder = builder.resync_period(parse_duration(period));
        }
        if let Some(fail) = option(arguments, "transform") {
            let fail = fail.to_owned();
            builder = builder.transform(move |object: Thing| Ok(mark(&fail, object)?));
        }
        let informer = builder.build();
        if option(arguments, "errors").is_some() {
            let log = self.log.clone();
            informer.on_error(move |_| log.add("errors", "reported"));
        }
        Running { server, informer }
    }

    fn add_handler(&mut self, name: &str, arguments: &[&str]) -> Vec<String> {
        let informer = self.informer();
        let (recorder, release) = Recorder::new(name, &self.log, informer.indexer(), arguments);
        let resync_period = option(arguments, "resync").map(parse_duration);
        let options = HandlerOptions { resync_period, ..HandlerOptions::default() };
        let added = match option(arguments, "filter") {
            Some(color) => {
                let color = color.to_owned();
                let passes = move |object: &Thing| colors(object).contains(&color);
                informer.add_event_handler_with_options(FilteredHandler::new(passes, recorder), options)
            }
            None => informer.add_event_handler_with_options(recorder, options),
        };
        let accepted = added.is_ok();
        if let Ok(registration) = added {
            self.handlers.insert(name.to_owned(), Handler { registration, release });
        }
        outcome(accepted)
    }

    fn informer(&self) -> &SharedInformer<Value> {
        &self.running.as_ref().unwrap().informer
    }
}

impl Piece for Informers {
    fn step<'a>(&'a mut self, command: &'a str, arguments: &'a [&'a str]) -> LocalBoxFuture<'a, Vec<String>> {
        async move {
            if command == "new" {
                self.running = Some(self.create(arguments));
                return Vec::new();
            }
            if self.running.as_ref().unwrap().server.step(command, arguments) {
                return Vec::new();
            }
            match (command, arguments) {
                ("start", []) => {
                    let informer = self.informer().clone();
                    let log = self.log.clone();
                    let mut stopped = self.stop.subscribe();
                    tokio::spawn(async move {
                        // A second start is refused.
                        let _ = informer.run(async move { drop(stopped.wait_for(|stopped| *stopped).await) }).await;
                        log.add("informer", "stopped");
                    });
                }
                ("stop", []) => drop(self.stop.send(true)),
                ("handler", [name, arguments @ ..]) => return self.add_handler(name, arguments),
                ("remove", [name]) => self.handlers[*name].registration.remove().await,
                ("unblock", [name]) => drop(self.handlers[*name].release.send(true)),
                ("synced", []) => return vec![self.informer().has_synced().to_string()],
                ("synced", [name]) => return vec![self.handlers[*name].registration.has_synced().to_string()],
                ("lister-list", []) => return vec![format_all(&self.informer().lister().list())],
                ("lister-list", [namespace]) => {
                    return vec![format_all(&self.informer().lister().namespace(namespace).list())];
                }
                ("lister-get", [namespace, name]) => {
                    let object = self.informer().lister().namespace(namespace).get(name);
                    return vec![object.map_or("nothing".to_owned(), |object| format(&object))];
                }
                ("version", []) => return vec![shown(&self.informer().resource_version()).to_owned()],
                _ => return read(self.informer().indexer(), command, arguments),
            }
            Vec::new()
        }
        .boxed_local()
    }
}
