//! One reflector, many handlers: client-go's `SharedInformer`.
//!
//! The reflector writes to a delta queue, and the same call drains it: first the store changes,
//! then each handler's own queue gets the call. So the store is never behind a handler's calls, and
//! a handler never delays the store or another handler. There is no task between reflector and
//! store: if processing falls behind, the connection's flow control slows the server down, and no
//! queue grows.

mod backlog;
mod error;
mod factory;
mod handler;
mod lister;
mod process;
mod registration;
mod shared_informer;
mod subscription;

pub use self::{
    backlog::Backlog,
    error::{HandlerEnd, InformerError},
    factory::SharedInformerFactory,
    handler::{EventHandler, FilteredHandler, HandlerFuncs},
    lister::{Lister, NamespaceLister},
    registration::{HandlerOptions, Registration},
    shared_informer::{InformerBuilder, SharedInformer},
    subscription::{HandlerCall, Subscription},
};

#[cfg(test)]
mod tests;
