package kubefan

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

const vectors = "../../proto/kubefan/v1alpha1/testdata"

func vector(t *testing.T, file string) []byte {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(vectors, file))
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func TestEveryTestVectorIsDecodedOrRefused(t *testing.T) {
	var index struct {
		Deltas []struct{ Name, Held, Delta, Object, Error string }
		Chunks []struct {
			Name, Chunk, Error string
			Events             []struct {
				Namespace, Name, Object string
				ResourceVersion         string `json:"resource_version"`
			}
		}
	}
	if err := json.Unmarshal(vector(t, "index.json"), &index); err != nil {
		t.Fatal(err)
	}
	if len(index.Deltas) == 0 || len(index.Chunks) == 0 {
		t.Fatal("no vectors")
	}
	for _, want := range index.Deltas {
		delta := new(api.ObjectDelta)
		if err := proto.Unmarshal(vector(t, want.Delta), delta); err != nil {
			t.Fatal(want.Name, err)
		}
		object, err := decodeDelta(vector(t, want.Held), delta)
		if (err != nil) != (want.Error != "") || errors.Is(err, errWrongBase) != (want.Error == "wrong_base") {
			t.Errorf("%s: %v", want.Name, err)
		}
		if err == nil && !bytes.Equal(object, vector(t, want.Object)) {
			t.Errorf("%s: other bytes", want.Name)
		}
	}
	for _, want := range index.Chunks {
		events, err := decodeChunk(vector(t, want.Chunk))
		if (err != nil) != (want.Error != "") {
			t.Errorf("%s: %v", want.Name, err)
		}
		if err == nil && len(events) != len(want.Events) {
			t.Fatalf("%s: %d events", want.Name, len(events))
		}
		for i, event := range want.Events {
			got := events[i]
			if got.Namespace != event.Namespace || got.Name != event.Name || string(got.Object) != event.Object ||
				got.ResourceVersion != event.ResourceVersion {
				t.Errorf("%s: other events", want.Name)
			}
		}
	}
}

func TestABaseAboveItsLimitIsGivenUp(t *testing.T) {
	base := newDeltaBase(200)
	event := &api.Event{Name: "a", Object: make([]byte, 300)}
	if err := base.resolve(event); err != nil || !base.overLimit || len(base.objects) != 0 {
		t.Fatal(err, base)
	}
	base.endSnapshot()
	event = &api.Event{Name: "a", Delta: &api.ObjectDelta{}}
	if err := base.resolve(event); !errors.Is(err, errOverLimit) || base.complete {
		t.Fatal(err)
	}
}
