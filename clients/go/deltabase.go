package kubefan

import (
	"errors"
	"fmt"

	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// deltaEntryBytes is the approximate memory of an entry besides the object's bytes and its key.
const deltaEntryBytes = 128

var (
	errNoBase    = errors.New("a delta arrived for an object without a delta base")
	errOverLimit = errors.New("the objects exceed DeltaBaseBytesMax; continuing without deltas")
)

// deltaBase has the bytes of every object that a watch was sent. The next delta of an object applies
// to them. The hazard is a base that differs from the server's: so each delta has a checksum of its
// base, and after any mismatch the whole base is discarded.
type deltaBase struct {
	objects   map[string][]byte
	bytes     int
	bytesMax  int
	overLimit bool
	// complete: every object of the watch is here.
	complete bool
}

func newDeltaBase(bytesMax int) *deltaBase {
	return &deltaBase{objects: map[string][]byte{}, bytesMax: bytesMax}
}

func (b *deltaBase) clear() { *b = *newDeltaBase(b.bytesMax) }

func (b *deltaBase) endSnapshot() { b.complete = !b.overLimit }

// resolve replaces the event's delta by the whole object, and holds the object as the next base.
func (b *deltaBase) resolve(event *api.Event) error {
	key := event.GetNamespace() + "/" + event.GetName()
	if delta := event.GetDelta(); delta != nil {
		held, found := b.objects[key]
		switch {
		case b.overLimit:
			return errOverLimit
		case !found:
			return errNoBase
		}
		object, err := decodeDelta(held, delta)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		event.Object, event.Delta = object, nil
	}
	b.remove(key)
	if event.GetType() == api.EventType_EVENT_TYPE_DELETED || b.overLimit {
		return nil
	}
	b.objects[key] = event.Object
	b.bytes += len(event.Object) + len(key) + deltaEntryBytes
	if b.bytes > b.bytesMax {
		b.clear()
		b.overLimit = true
	}
	return nil
}

func (b *deltaBase) remove(key string) {
	if before, found := b.objects[key]; found {
		b.bytes -= len(before) + len(key) + deltaEntryBytes
		delete(b.objects, key)
	}
}
