package contract

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"
)

// A reflectorPiece is a reflector that writes to a store, which logs the calls.
type reflectorPiece struct {
	log       *log
	server    *server
	store     *loggedStore
	reflector *cache.Reflector
	context   context.Context
	cancel    context.CancelFunc
}

// A loggedStore is a store that logs every change.
type loggedStore struct {
	cache.Store
	log *log
}

func (s *loggedStore) Add(value any) error {
	s.log.add("store", "add %s", format(value))
	return s.Store.Add(value)
}

func (s *loggedStore) Update(value any) error {
	s.log.add("store", "update %s", format(value))
	return s.Store.Update(value)
}

func (s *loggedStore) Delete(value any) error {
	s.log.add("store", "delete %s", format(value))
	return s.Store.Delete(value)
}

func (s *loggedStore) Replace(values []any, version string) error {
	s.log.add("store", "replace rv=%s %s", version, formatAll(values))
	return s.Store.Replace(values, version)
}

func (s *loggedStore) Resync() error {
	s.log.add("store", "resync")
	return s.Store.Resync()
}

func newServer(log *log, arguments []string) *server {
	_, list := option(arguments, "list")
	_, requests := option(arguments, "requests")
	return &server{log: log, watchList: !list, requests: requests, version: "0"}
}

func newReflectorPiece(log *log) piece {
	ctx, cancel := context.WithCancel(context.Background())
	return &reflectorPiece{log: log, context: ctx, cancel: cancel}
}

func (p *reflectorPiece) close() { p.cancel() }

func (p *reflectorPiece) step(command string, arguments []string) []string {
	if p.server != nil && p.server.step(command, arguments) {
		return nil
	}
	switch command {
	case "new":
		p.server = newServer(p.log, append(arguments, "requests"))
		inner := cache.NewStore(cache.MetaNamespaceKeyFunc)
		if _, undelta := option(arguments, "undelta"); undelta {
			push := func(objects []any) { p.log.add("push", "%s", formatAll(objects)) }
			inner = cache.NewUndeltaStore(push, cache.MetaNamespaceKeyFunc)
		}
		p.store = &loggedStore{inner, p.log}
		options := cache.ReflectorOptions{}
		if resync := durationOption(arguments, "resync"); resync != nil {
			options.ResyncPeriod = *resync
		}
		p.reflector = cache.NewReflectorWithOptions(p.server, &object{}, p.store, options)
		if size := durationOption(arguments, "page-size"); size != nil {
			p.reflector.WatchListPageSize = int64(*size / time.Second)
		}
		return nil
	case "start":
		go p.reflector.RunWithContext(p.context)
		return nil
	case "list-and-watch":
		go func() {
			err := p.reflector.ListAndWatchWithContext(p.context)
			if err != nil {
				p.log.add("returned", "failed")
			} else {
				p.log.add("returned", "ended")
			}
		}()
		return nil
	case "stop":
		p.cancel()
		return nil
	case "version":
		return []string{shown(p.reflector.LastSyncResourceVersion())}
	}
	return readStore(p.store, command, arguments)
}

// An informerPiece is a shared informer with handlers.
type informerPiece struct {
	log      *log
	server   *server
	informer cache.SharedIndexInformer
	handlers map[string]*handler
	context  context.Context
	cancel   context.CancelFunc
}

func newInformerPiece(log *log) piece {
	ctx, cancel := context.WithCancel(context.Background())
	return &informerPiece{log: log, handlers: map[string]*handler{}, context: ctx, cancel: cancel}
}

func (p *informerPiece) close() {
	p.cancel()
	for _, handler := range p.handlers {
		handler.unblock()
	}
	// A handler that has panicked pauses for a second.
	time.Sleep(time.Minute)
}

func (p *informerPiece) step(command string, arguments []string) []string {
	if p.server != nil && p.server.step(command, arguments) {
		return nil
	}
	switch command {
	case "new":
		p.server = newServer(p.log, arguments)
		options := cache.SharedIndexInformerOptions{Indexers: indexers("namespace")}
		if resync := durationOption(arguments, "resync"); resync != nil {
			options.ResyncPeriod = *resync
		}
		p.informer = cache.NewSharedIndexInformerWithOptions(p.server, &object{}, options)
		if fail, found := option(arguments, "transform"); found {
			must(p.informer.SetTransform(transform(fail)))
		}
		must(p.informer.SetWatchErrorHandler(func(*cache.Reflector, error) {
			if _, logged := option(arguments, "errors"); logged {
				p.log.add("errors", "reported")
			}
		}))
		return nil
	case "start":
		go func() {
			p.informer.RunWithContext(p.context)
			p.log.add("informer", "stopped")
		}()
		return nil
	case "stop":
		p.cancel()
		return nil
	case "handler":
		return p.addHandler(arguments[0], arguments[1:])
	case "remove":
		return outcome(p.informer.RemoveEventHandler(p.handlers[arguments[0]].registration))
	case "unblock":
		p.handlers[arguments[0]].unblock()
		return nil
	case "synced":
		if len(arguments) == 0 {
			return []string{fmt.Sprint(p.informer.HasSynced())}
		}
		return []string{fmt.Sprint(p.handlers[arguments[0]].registration.HasSynced())}
	case "lister-list", "lister-get":
		return p.list(command, arguments)
	case "index":
		return outcome(p.informer.AddIndexers(indexers(arguments[0])))
	case "version":
		return []string{shown(p.informer.LastSyncResourceVersion())}
	}
	return readStore(p.informer.GetStore(), command, arguments)
}

// list reads by namespace and name.
func (p *informerPiece) list(command string, arguments []string) []string {
	lister := cache.NewGenericLister(p.informer.GetIndexer(), resource)
	if command == "lister-get" {
		object, err := lister.ByNamespace(arguments[0]).Get(arguments[1])
		if err != nil {
			return []string{"nothing"}
		}
		return []string{format(object)}
	}
	list := lister.List
	if len(arguments) != 0 {
		list = lister.ByNamespace(arguments[0]).List
	}
	objects, err := list(labels.Everything())
	must(err)
	values := []any{}
	for _, object := range objects {
		values = append(values, object)
	}
	return []string{formatAll(values)}
}

func (p *informerPiece) addHandler(name string, arguments []string) []string {
	handler := &handler{name: name, log: p.log, released: make(chan struct{})}
	if _, blocked := option(arguments, "blocked"); !blocked {
		handler.unblock()
	}
	if _, reads := option(arguments, "reads-store"); reads {
		handler.store = p.informer.GetStore()
	}
	handler.panicsAt, _ = option(arguments, "panics-at")
	options := cache.HandlerOptions{ResyncPeriod: durationOption(arguments, "resync")}
	var registered cache.ResourceEventHandler = handler
	if color, filtered := option(arguments, "filter"); filtered {
		registered = cache.FilteringResourceEventHandler{Handler: handler, FilterFunc: func(value any) bool {
			values, err := indexers("color")["color"](lastKnown(value))
			must(err)
			for _, value := range values {
				if value == color {
					return true
				}
			}
			return false
		}}
	}
	registration, err := p.informer.AddEventHandlerWithOptions(registered, options)
	handler.registration = registration
	if err == nil {
		p.handlers[name] = handler
	}
	return outcome(err)
}

func lastKnown(value any) any {
	if tombstone, ok := value.(cache.DeletedFinalStateUnknown); ok {
		return tombstone.Obj
	}
	return value
}

// A handler logs its calls.
type handler struct {
	name         string
	log          *log
	store        cache.Store
	panicsAt     string
	released     chan struct{}
	free         bool
	registration cache.ResourceEventHandlerRegistration
}

func (h *handler) unblock() {
	if !h.free {
		h.free = true
		close(h.released)
	}
}

func (h *handler) called(key any, line string) {
	if h.store != nil {
		name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(key)
		must(err)
		line += ", store has " + readStore(h.store, "get", []string{name})[0]
	}
	h.log.add(h.name, "%s", line)
	<-h.released
	if h.panicsAt != "" && h.panicsAt == format(lastKnown(key)) {
		panic("the script says so")
	}
}

func (h *handler) OnAdd(value any, initial bool) {
	line := "add " + format(value)
	if initial {
		line += " initial"
	}
	h.called(value, line)
}

func (h *handler) OnUpdate(before, after any) {
	h.called(after, "update "+format(before)+" -> "+format(after))
}

func (h *handler) OnDelete(value any) {
	h.called(value, "delete "+formatDeleted(value))
}
