//! The handlers that an informer calls.

use std::{fmt, future::Future, marker::PhantomData, sync::Arc};

use crate::{
    object::{Object, ObjectKey},
    store::Deleted,
};

/// A change, as a handler gets it.
#[derive(Debug)]
pub(crate) enum Notification<K> {
    Add { object: Arc<Object<K>>, is_in_initial_list: bool },
    Update { old: Arc<Object<K>>, new: Arc<Object<K>> },
    Delete(Deleted<K>),
}

impl<K> Clone for Notification<K> {
    fn clone(&self) -> Self {
        match self {
            Self::Add { object, is_in_initial_list } => {
                Self::Add { object: object.clone(), is_in_initial_list: *is_in_initial_list }
            }
            Self::Update { old, new } => Self::Update { old: old.clone(), new: new.clone() },
            Self::Delete(deleted) => Self::Delete(deleted.clone()),
        }
    }
}

/// Handles the changes of an informer's objects: client-go's `ResourceEventHandler`.
///
/// Calls come one at a time, in order, on a task of the handler's own. While one is under way,
/// further changes wait ([`Backlog`](super::Backlog)). A handler must not block its thread: work
/// that does belongs on `tokio::task::spawn_blocking`, or with its key in a
/// [`WorkQueue`](crate::WorkQueue). If a call panics, the handler gets no more calls, and the
/// informer reports it.
///
/// The methods can be written as `async fn`.
pub trait EventHandler<K: Send + Sync + 'static>: Send + 'static {
    /// An object is new. `is_in_initial_list` is true for objects that existed when the handler or
    /// the informer started.
    fn on_add(&mut self, object: Arc<Object<K>>, is_in_initial_list: bool) -> impl Future<Output = ()> + Send {
        let _ = (object, is_in_initial_list);
        async {}
    }

    /// An object changed. Both states may be the same object: a resync delivers it again. Several
    /// changes may be one call, if the handler is behind or the watch was interrupted.
    fn on_update(&mut self, old: Arc<Object<K>>, new: Arc<Object<K>>) -> impl Future<Output = ()> + Send {
        let _ = (old, new);
        async {}
    }

    /// An object is gone.
    fn on_delete(&mut self, deleted: Deleted<K>) -> impl Future<Output = ()> + Send {
        let _ = deleted;
        async {}
    }
}

type OnAdd<K> = Box<dyn FnMut(Arc<Object<K>>, bool) + Send>;
type OnUpdate<K> = Box<dyn FnMut(Arc<Object<K>>, Arc<Object<K>>) + Send>;
type OnDelete<K> = Box<dyn FnMut(Deleted<K>) + Send>;

/// A handler made of closures that do not wait: client-go's `ResourceEventHandlerFuncs`.
pub struct HandlerFuncs<K> {
    on_add: Option<OnAdd<K>>,
    on_update: Option<OnUpdate<K>>,
    on_delete: Option<OnDelete<K>>,
}

impl<K> HandlerFuncs<K> {
    /// Returns a handler that ignores everything.
    pub fn new() -> Self {
        Self { on_add: None, on_update: None, on_delete: None }
    }

    /// Sets the function for [`EventHandler::on_add`].
    #[must_use]
    pub fn on_add(mut self, function: impl FnMut(Arc<Object<K>>, bool) + Send + 'static) -> Self {
        self.on_add = Some(Box::new(function));
        self
    }

    /// Sets the function for [`EventHandler::on_update`].
    #[must_use]
    pub fn on_update(mut self, function: impl FnMut(Arc<Object<K>>, Arc<Object<K>>) + Send + 'static) -> Self {
        self.on_update = Some(Box::new(function));
        self
    }

    /// Sets the function for [`EventHandler::on_delete`].
    #[must_use]
    pub fn on_delete(mut self, function: impl FnMut(Deleted<K>) + Send + 'static) -> Self {
        self.on_delete = Some(Box::new(function));
        self
    }
}

impl<K: Send + Sync + 'static> HandlerFuncs<K> {
    /// Returns a handler that gets the key of each object that was added, changed or deleted, as a
    /// controller puts it into its [`WorkQueue`](crate::WorkQueue).
    pub fn for_keys(function: impl Fn(&ObjectKey) + Send + Sync + 'static) -> Self {
        let function = Arc::new(function);
        let added = function.clone();
        let updated = function.clone();
        Self::new()
            .on_add(move |object, _| added(object.key()))
            .on_update(move |_, new| updated(new.key()))
            .on_delete(move |deleted| function(deleted.key()))
    }
}

impl<K> Default for HandlerFuncs<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K> fmt::Debug for HandlerFuncs<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HandlerFuncs").finish_non_exhaustive()
    }
}

impl<K: Send + Sync + 'static> EventHandler<K> for HandlerFuncs<K> {
    async fn on_add(&mut self, object: Arc<Object<K>>, is_in_initial_list: bool) {
        if let Some(function) = &mut self.on_add {
            function(object, is_in_initial_list);
        }
    }

    async fn on_update(&mut self, old: Arc<Object<K>>, new: Arc<Object<K>>) {
        if let Some(function) = &mut self.on_update {
            function(old, new);
        }
    }

    async fn on_delete(&mut self, deleted: Deleted<K>) {
        if let Some(function) = &mut self.on_delete {
            function(deleted);
        }
    }
}

/// Passes on only the objects for which a predicate is true: client-go's
/// `FilteringResourceEventHandler`. An update that makes it true is an addition, an update that
/// makes it false is a deletion.
pub struct FilteredHandler<K, P, H> {
    predicate: P,
    handler: H,
    _object: PhantomData<fn(K)>,
}

impl<K, P, H> FilteredHandler<K, P, H>
where
    K: Send + Sync + 'static,
    P: Fn(&Object<K>) -> bool + Send + 'static,
    H: EventHandler<K>,
{
    /// Returns `handler` behind `predicate`, which must depend on nothing but the object.
    pub fn new(predicate: P, handler: H) -> Self {
        Self { predicate, handler, _object: PhantomData }
    }
}

impl<K, P, H> EventHandler<K> for FilteredHandler<K, P, H>
where
    K: Send + Sync + 'static,
    P: Fn(&Object<K>) -> bool + Send + 'static,
    H: EventHandler<K>,
{
    fn on_add(&mut self, object: Arc<Object<K>>, is_in_initial_list: bool) -> impl Future<Output = ()> + Send {
        let passes = (self.predicate)(&object);
        async move {
            if passes {
                self.handler.on_add(object, is_in_initial_list).await;
            }
        }
    }

    fn on_update(&mut self, old: Arc<Object<K>>, new: Arc<Object<K>>) -> impl Future<Output = ()> + Send {
        let passes = ((self.predicate)(&old), (self.predicate)(&new));
        async move {
            match passes {
                (true, true) => self.handler.on_update(old, new).await,
                (false, true) => self.handler.on_add(new, false).await,
                (true, false) => self.handler.on_delete(Deleted::Known(old)).await,
                (false, false) => {}
            }
        }
    }

    fn on_delete(&mut self, deleted: Deleted<K>) -> impl Future<Output = ()> + Send {
        // Without a last state the predicate cannot be asked; the handler may know the key.
        let passes = deleted.last_known().is_none_or(|object| (self.predicate)(object));
        async move {
            if passes {
                self.handler.on_delete(deleted).await;
            }
        }
    }
}

impl<K, P, H> fmt::Debug for FilteredHandler<K, P, H> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FilteredHandler").finish_non_exhaustive()
    }
}
