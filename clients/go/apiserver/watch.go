package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	kubefan "kubefan.dev/clients/go"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// watch has the events of one request.
type watch struct {
	server      *server
	body        io.ReadCloser
	decoder     *json.Decoder
	cancel      context.CancelFunc
	projection  kubefan.Projection
	hasSelector bool
}

var eventTypes = map[string]api.EventType{
	"ADDED":    api.EventType_EVENT_TYPE_ADDED,
	"MODIFIED": api.EventType_EVENT_TYPE_MODIFIED,
	"DELETED":  api.EventType_EVENT_TYPE_DELETED,
}

// Next returns the next event, or the version of a bookmark. It returns io.EOF after the watch's
// timeout.
func (w *watch) Next() (*api.Event, string, error) {
	for {
		var line struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		err := w.decoder.Decode(&line)
		switch {
		case errors.Is(err, io.EOF):
			return nil, "", io.EOF
		case err != nil:
			return nil, "", w.server.broken(err)
		}
		switch line.Type {
		case "ERROR":
			made := status{}
			if err := json.Unmarshal(line.Object, &made); err != nil {
				return nil, "", w.server.failure(fmt.Sprintf("an error that cannot be read: %v", err))
			}
			return nil, "", w.server.refusal(made, kubefan.ReasonResourceNotFound)
		case "BOOKMARK":
			known, err := identityOf(line.Object)
			if err != nil {
				return nil, "", w.server.failure(fmt.Sprintf("a bookmark that cannot be read: %v", err))
			}
			return nil, known.Metadata.ResourceVersion, nil
		}
		kind, found := eventTypes[line.Type]
		if !found {
			// A newer server has it. The watch goes on.
			continue
		}
		event, err := w.event(kind, line.Object)
		if err != nil {
			return nil, "", w.server.failure(fmt.Sprintf("an event that cannot be read: %v", err))
		}
		return event, "", nil
	}
}

func (w *watch) event(kind api.EventType, content []byte) (*api.Event, error) {
	known, err := identityOf(content)
	if err != nil {
		return nil, err
	}
	projected, err := project(content, w.projection)
	if err != nil {
		return nil, err
	}
	meta := known.Metadata
	made := &api.Event{
		Type: kind, Namespace: meta.Namespace, Name: meta.Name, Uid: meta.UID, ResourceVersion: meta.ResourceVersion,
		Object: bytes.Clone(projected),
	}
	// With a selector the object may exist, and have ceased to match.
	if kind == api.EventType_EVENT_TYPE_DELETED && !w.hasSelector {
		made.DeleteReason = api.DeleteReason_DELETE_REASON_OBJECT_DELETED
	}
	return made, nil
}

// Close ends the watch.
func (w *watch) Close() {
	w.cancel()
	_ = w.body.Close()
}
