package informers

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"strconv"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	kubefan "kubefan.dev/clients/go"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// watcher converts the items of a watch to events of client-go.
type watcher struct {
	source  *ListWatch
	stream  *kubefan.WatchStream
	ctx     context.Context
	cancel  context.CancelFunc
	results chan watch.Event
	done    chan struct{}
	stop    sync.Once

	// inState: the initial state is not complete yet.
	inState   bool
	bookmarks bool
	// version is the last one that was passed on.
	version string
	// unit has the events of a gap or a catch-up; nil outside.
	unit []*api.Event
	// inUnit: a gap or a catch-up is not complete yet.
	inUnit bool
}

// ResultChan returns the events. It is closed at the end of the watch.
func (w *watcher) ResultChan() <-chan watch.Event { return w.results }

// Stop ends the watch, and returns when its goroutine has ended.
func (w *watcher) Stop() {
	w.stop.Do(w.cancel)
	<-w.done
}

func (w *watcher) run() {
	defer close(w.done)
	defer close(w.results)
	defer w.stream.Close()
	defer w.cancel()
	for {
		item, err := w.stream.Next()
		if err != nil {
			if !errors.Is(err, io.EOF) && w.ctx.Err() == nil {
				w.source.expired(err)
				w.fail(err)
			}
			return
		}
		if !w.pass(item) {
			return
		}
	}
}

// pass converts one item. It returns false at the end of the watch.
func (w *watcher) pass(item kubefan.WatchItem) bool {
	switch item.Kind {
	case kubefan.ItemEvent:
		if w.inUnit {
			w.unit = append(w.unit, item.Event)
			return true
		}
		if !w.event(item.Event) {
			return false
		}
	case kubefan.ItemSnapshotBegin:
		if !w.inState {
			// Only a server that ignores ON_EXPIRED_FAIL does this.
			w.fail(&kubefan.Error{
				Address: w.source.client.Address(), Code: expiredCode, Reason: kubefan.ReasonTooOld,
				Message: "the watch cannot resume from version " + w.version,
			})
			return false
		}
		if err := w.source.accepts(item.ResourceVersion, item.SnapshotCluster); err != nil {
			w.fail(err)
			return false
		}
		return true
	case kubefan.ItemSnapshotEnd:
		w.inState = false
		w.source.deliveredState(item.ResumeVersion, item.Cluster)
		w.version = whole(item.ResumeVersion)
		return w.bookmark(w.version, true)
	case kubefan.ItemGapBegin, kubefan.ItemCatchUpBegin:
		w.inUnit, w.unit = true, nil
		return true
	case kubefan.ItemGapEnd, kubefan.ItemCatchUpEnd:
		if !w.unitEnded(item) {
			return false
		}
	case kubefan.ItemDisconnected, kubefan.ItemRestarted:
		w.inUnit, w.unit = false, nil
		w.source.report(item.Err)
		if w.inState {
			w.fail(item.Err)
			return false
		}
		return true
	}
	return w.moved(item)
}

// moved passes on a version that no event had: of a bookmark, or of the end of a unit.
func (w *watcher) moved(item kubefan.WatchItem) bool {
	if w.inState || w.inUnit || item.ResumeVersion == "" {
		return true
	}
	w.source.delivered(item.ResumeVersion, item.Cluster)
	if whole(item.ResumeVersion) == w.version {
		return true
	}
	w.version = whole(item.ResumeVersion)
	return w.bookmark(w.version, false)
}

// unitEnded passes on the events of a gap or a catch-up, in the order of versions, so that the
// version of a reader never goes back.
func (w *watcher) unitEnded(item kubefan.WatchItem) bool {
	events := w.unit
	w.inUnit, w.unit = false, nil
	if !inVersionOrder(events) {
		w.fail(&kubefan.Error{
			Address: w.source.client.Address(), Code: expiredCode, Reason: kubefan.ReasonTooOld,
			Message: "objects were deleted while the watch was behind, in a final state that is unknown; list again, from version " +
				whole(item.ResumeVersion),
		})
		return false
	}
	for _, event := range events {
		if !w.event(event) {
			return false
		}
	}
	return true
}

// inVersionOrder sorts by version. It returns false if a deletion has no final state.
func inVersionOrder(events []*api.Event) bool {
	for _, event := range events {
		if event.GetDeleteReason() == api.DeleteReason_DELETE_REASON_FINAL_STATE_UNKNOWN {
			return false
		}
	}
	number := func(event *api.Event) uint64 {
		version, _ := strconv.ParseUint(event.GetResourceVersion(), 10, 64)
		return version
	}
	slices.SortStableFunc(events, func(a, b *api.Event) int { return cmp.Compare(number(a), number(b)) })
	return true
}

var eventTypes = map[api.EventType]watch.EventType{
	api.EventType_EVENT_TYPE_ADDED:    watch.Added,
	api.EventType_EVENT_TYPE_MODIFIED: watch.Modified,
	api.EventType_EVENT_TYPE_DELETED:  watch.Deleted,
}

func (w *watcher) event(event *api.Event) bool {
	kind, found := eventTypes[event.GetType()]
	if !found {
		w.source.report(errors.New(key(event.GetNamespace(), event.GetName()) +
			": an event of an unknown type; is this package too old?"))
		return true
	}
	object, err := w.source.decode.event(event)
	if err != nil {
		// The store keeps the previous state, and the watch continues.
		w.source.report(err)
		return true
	}
	if !w.inState {
		w.version = event.GetResourceVersion()
	}
	return w.send(watch.Event{Type: kind, Object: object})
}

func (w *watcher) bookmark(version string, endsState bool) bool {
	if !w.bookmarks {
		return true
	}
	object, err := w.source.decode.bookmark(version, endsState)
	if err != nil {
		w.fail(err)
		return false
	}
	return w.send(watch.Event{Type: watch.Bookmark, Object: object})
}

// fail ends the watch with an error, which the reader decides about.
func (w *watcher) fail(err error) {
	status := metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}
	if known, ok := apiError(err).(apierrors.APIStatus); ok {
		status = known.Status()
	}
	w.send(watch.Event{Type: watch.Error, Object: &status})
}

func (w *watcher) send(event watch.Event) bool {
	select {
	case w.results <- event:
		return true
	case <-w.ctx.Done():
		return false
	}
}
