package transport

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
)

// body is the body of an answer. It releases what the answer has used when it is closed.
type body struct {
	io.ReadCloser
	release func()
}

func (b *body) Close() error {
	err := b.ReadCloser.Close()
	b.release()
	return err
}

// kubefanWatch is the body of a watch of kubefan. A connection that is lost ends it with
// io.ErrUnexpectedEOF, whatever net/http calls it: client-go's reflector then resumes from its last
// version. Other errors, such as that of an HTTP/2 PING without an answer, would make it list.
type kubefanWatch struct {
	body
	caller context.Context
}

func (b *kubefanWatch) Read(into []byte) (int, error) {
	count, err := b.body.Read(into)
	if err == nil || errors.Is(err, io.EOF) || b.caller.Err() != nil {
		return count, err
	}
	return count, io.ErrUnexpectedEOF
}

// directWatch is the body of a watch that has moved to the apiserver. It ends like one whose time
// is up when kubefan is back, so that its caller resumes there.
type directWatch struct {
	body
	cancel  context.CancelFunc
	isEnded atomic.Bool
}

func (b *directWatch) Read(into []byte) (int, error) {
	count, err := b.body.Read(into)
	if err != nil && b.isEnded.Load() {
		return count, io.EOF
	}
	return count, err
}

func (b *directWatch) end() {
	b.isEnded.Store(true)
	b.cancel()
}

// directWatches are the watches that have moved to the apiserver.
type directWatches struct {
	mu   sync.Mutex
	open map[*directWatch]struct{}
}

func (w *directWatches) add(made *directWatch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open == nil {
		w.open = map[*directWatch]struct{}{}
	}
	w.open[made] = struct{}{}
}

func (w *directWatches) remove(gone *directWatch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, gone)
}

func (w *directWatches) all() (open []*directWatch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for each := range w.open {
		open = append(open, each)
	}
	return open
}
