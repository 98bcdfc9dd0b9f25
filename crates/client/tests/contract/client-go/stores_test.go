package contract

import (
	"k8s.io/client-go/tools/cache"
)

type keys struct{}

func (keys) close() {}

func (keys) step(command string, arguments []string) []string {
	switch command {
	case "key-of":
		key, err := cache.MetaNamespaceKeyFunc(parse(arguments[0]))
		must(err)
		return []string{key}
	case "split":
		namespace, name, err := cache.SplitMetaNamespaceKey(arguments[0])
		must(err)
		return []string{"namespace=" + namespace + " name=" + name}
	}
	return unknown(command)
}

// A storePiece is a cache.Store, with indexes if it is a cache.Indexer.
type storePiece struct {
	store cache.Store
}

func newStorePiece(*log) piece {
	return &storePiece{cache.NewIndexer(cache.DeletionHandlingMetaNamespaceKeyFunc, cache.Indexers{})}
}

func newUndeltaPiece(log *log) piece {
	push := func(objects []any) { log.add("push", "%s", formatAll(objects)) }
	return &storePiece{cache.NewUndeltaStore(push, cache.MetaNamespaceKeyFunc)}
}

func newExpirationPiece(*log) piece {
	return &storePiece{}
}

func (*storePiece) close() {}

func (p *storePiece) step(command string, arguments []string) []string {
	switch command {
	case "new":
		ttl := durationOption(arguments, "ttl")
		p.store = cache.NewTTLStore(cache.MetaNamespaceKeyFunc, *ttl)
		return nil
	case "add":
		return outcome(p.store.Add(parse(arguments[0])))
	case "update":
		return outcome(p.store.Update(parse(arguments[0])))
	case "delete":
		return outcome(p.store.Delete(parse(arguments[0])))
	case "delete-unknown":
		key := arguments[0]
		return outcome(p.store.Delete(cache.DeletedFinalStateUnknown{Key: key}))
	case "replace":
		return outcome(p.store.Replace(parseAll(arguments[1:]), arguments[0]))
	case "resync":
		return outcome(p.store.Resync())
	}
	return readStore(p.store, command, arguments)
}

// readStore answers the steps that only read.
func readStore(store cache.Store, command string, arguments []string) []string {
	indexer, _ := store.(cache.Indexer)
	switch command {
	case "get":
		object, exists, err := store.GetByKey(arguments[0])
		must(err)
		if !exists {
			return []string{"nothing"}
		}
		return []string{format(object)}
	case "list":
		return []string{formatAll(store.List())}
	case "keys":
		return []string{sorted(store.ListKeys())}
	case "index":
		return outcome(indexer.AddIndexers(indexers(arguments[0])))
	case "by-index":
		objects, err := indexer.ByIndex(arguments[0], arguments[1])
		if err != nil {
			return []string{"refused"}
		}
		return []string{formatAll(objects)}
	case "index-keys":
		keys, err := indexer.IndexKeys(arguments[0], arguments[1])
		if err != nil {
			return []string{"refused"}
		}
		return []string{sorted(keys)}
	case "index-values":
		return []string{sorted(indexer.ListIndexFuncValues(arguments[0]))}
	}
	return unknown(command)
}
