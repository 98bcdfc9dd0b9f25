package main

import (
	"fmt"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
)

// An event as client-go's reflector passes it to its store.
type event struct {
	kind    string
	key     string
	version uint64
	at      time.Time
}

// A list, or the initial state of a watch, which replaces what was known.
type listing struct {
	version uint64
	// The newest version that had been seen before. What lies between the two has no events.
	after uint64
	at    time.Time
}

// record keeps what one reflector receives. It is the reflector's store.
type record struct {
	lock     sync.Mutex
	events   []event
	listings []listing
	// The present versions, by namespace and name.
	state  map[string]uint64
	newest uint64
	// The errors of lists and watches, and the last of them.
	errors    int
	lastError string
	// Answers of kubefan's caches, and answers that it passed on.
	cached    int
	forwarded int
	// The first failure of this program itself.
	fault error
}

func (r *record) Add(object any) error    { return r.note("ADDED", object) }
func (r *record) Update(object any) error { return r.note("MODIFIED", object) }
func (r *record) Delete(object any) error { return r.note("DELETED", object) }
func (r *record) Resync() error           { return nil }

func (r *record) note(kind string, object any) error {
	at := time.Now()
	key, version, err := identify(object)
	r.lock.Lock()
	defer r.lock.Unlock()
	if err != nil {
		r.fault = err
		return err
	}
	r.events = append(r.events, event{kind: kind, key: key, version: version, at: at})
	r.newest = max(r.newest, version)
	if kind == "DELETED" {
		delete(r.state, key)
	} else {
		r.state[key] = version
	}
	return nil
}

func (r *record) Replace(objects []any, listed string) error {
	r.lock.Lock()
	defer r.lock.Unlock()
	version, err := strconv.ParseUint(listed, 10, 64)
	if err != nil {
		r.fault = err
		return err
	}
	r.listings = append(r.listings, listing{version: version, after: r.newest, at: time.Now()})
	r.newest = max(r.newest, version)
	r.state = make(map[string]uint64, len(objects))
	for _, object := range objects {
		key, version, err := identify(object)
		if err != nil {
			r.fault = err
			return err
		}
		r.state[key] = version
	}
	return nil
}

func (r *record) fail(err error) {
	r.lock.Lock()
	defer r.lock.Unlock()
	r.errors++
	r.lastError = err.Error()
}

func (r *record) isListed() bool {
	r.lock.Lock()
	defer r.lock.Unlock()
	return len(r.listings) > 0
}

func (r *record) lastFailure() string {
	r.lock.Lock()
	defer r.lock.Unlock()
	return r.lastError
}

func identify(object any) (key string, version uint64, err error) {
	accessor, err := meta.Accessor(object)
	if err != nil {
		return "", 0, err
	}
	key = accessor.GetNamespace() + "/" + accessor.GetName()
	version, err = strconv.ParseUint(accessor.GetResourceVersion(), 10, 64)
	if err != nil {
		return "", 0, fmt.Errorf("%s has the version %q", key, accessor.GetResourceVersion())
	}
	return key, version, nil
}
