package contract

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/client-go/tools/cache"
)

// A queuePiece is a delta queue. The script sets its known objects, and no step changes them.
type queuePiece struct {
	makeQueue func(known cache.Store) cache.Queue
	known     cache.Store
	queue     cache.Queue
}

func newDeltaPiece(*log) piece {
	return &queuePiece{makeQueue: func(known cache.Store) cache.Queue {
		return cache.NewDeltaFIFOWithOptions(cache.DeltaFIFOOptions{
			KnownObjects: known, EmitDeltaTypeReplaced: true,
		})
	}}
}

func newRealPiece(*log) piece {
	return &queuePiece{makeQueue: func(known cache.Store) cache.Queue {
		return cache.NewRealFIFO(cache.MetaNamespaceKeyFunc, known, nil)
	}}
}

func (*queuePiece) close() {}

func (p *queuePiece) step(command string, arguments []string) []string {
	switch command {
	case "new":
		p.known = cache.NewStore(cache.MetaNamespaceKeyFunc)
		p.queue = p.makeQueue(p.known)
		return nil
	case "known":
		return outcome(p.known.Replace(parseAll(arguments), ""))
	case "add":
		return outcome(p.queue.Add(parse(arguments[0])))
	case "update":
		return outcome(p.queue.Update(parse(arguments[0])))
	case "delete":
		return outcome(p.queue.Delete(parse(arguments[0])))
	case "delete-unknown":
		object := parse(arguments[0])
		key, err := cache.MetaNamespaceKeyFunc(object)
		must(err)
		return outcome(p.queue.Delete(cache.DeletedFinalStateUnknown{Key: key, Obj: object}))
	case "replace":
		return outcome(p.queue.Replace(parseAll(arguments[1:]), arguments[0]))
	case "resync":
		return outcome(p.queue.Resync())
	case "synced":
		return []string{fmt.Sprint(p.queue.HasSynced())}
	case "close":
		p.queue.Close()
		return nil
	case "pop":
		return p.pop()
	case "pop-batch":
		return p.popBatch()
	}
	return unknown(command)
}

func formatDelta(delta cache.Delta) string {
	return string(delta.Type) + " " + formatDeleted(delta.Object)
}

func formatDeltas(deltas []cache.Delta, initial bool) []string {
	texts := make([]string, 0, len(deltas))
	for _, delta := range deltas {
		texts = append(texts, formatDelta(delta))
	}
	line := strings.Join(texts, ", ")
	if initial {
		line += " (initial)"
	}
	return []string{line}
}

// pop takes everything that one call delivers. The queue is closed when a script lets it run empty.
func (p *queuePiece) pop() (lines []string) {
	_, err := p.queue.Pop(func(value any, initial bool) error {
		lines = formatDeltas(value.(cache.Deltas), initial)
		return nil
	})
	if errors.Is(err, cache.ErrFIFOClosed) {
		return []string{"closed"}
	}
	must(err)
	return lines
}

func (p *queuePiece) popBatch() (lines []string) {
	err := p.queue.(cache.QueueWithBatch).PopBatch(func(deltas []cache.Delta, initial bool) error {
		lines = formatDeltas(deltas, initial)
		return nil
	})
	if errors.Is(err, cache.ErrFIFOClosed) {
		return []string{"closed"}
	}
	must(err)
	return lines
}
