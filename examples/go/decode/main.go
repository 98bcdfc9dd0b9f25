// Decodes deltas and snapshot chunks as watch.proto specifies, and checks every test vector:
// go run ./decode ../../proto/kubefan/v1alpha1/testdata
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

const contentBytesMax = 64 << 20

var errWrongBase = errors.New("wrong_base")

// object applies a delta to the bytes that the client retained for the object. After an error the
// retained bytes cannot be trusted.
func object(held []byte, delta *api.ObjectDelta) ([]byte, error) {
	if crc32.ChecksumIEEE(held) != delta.BaseCrc32 {
		return nil, errWrongBase
	}
	return decompress(delta.Zstd, zstd.WithDecoderDictRaw(0, held)) // 0: the frame names no dictionary
}

// events decodes a snapshot chunk.
func events(chunk []byte) (events []*api.Event, err error) {
	content, err := decompress(chunk)
	for reader := bytes.NewReader(content); err == nil; {
		event := new(api.Event)
		if err = (protodelim.UnmarshalOptions{MaxSize: contentBytesMax}).UnmarshalFrom(reader, event); err == nil {
			events = append(events, event)
		}
	}
	if errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil
	}
	return events, err
}

func decompress(frame []byte, options ...zstd.DOption) ([]byte, error) {
	decoder, err := zstd.NewReader(nil, append(options, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(contentBytesMax))...)
	if err != nil {
		return nil, err
	}
	defer decoder.Close()
	return decoder.DecodeAll(frame, nil)
}

type deltaCase struct{ Name, Held, Delta, Object, Error string }

type chunkCase struct {
	Name, Chunk, Error string
	Events             []struct {
		Namespace, Name, Object string
		ResourceVersion         string `json:"resource_version"`
	}
}

func main() {
	read := func(file string) []byte {
		content, err := os.ReadFile(filepath.Join(os.Args[1], file))
		check(err == nil, "reading", err)
		return content
	}
	var index struct {
		Deltas []deltaCase
		Chunks []chunkCase
	}
	err := json.Unmarshal(read("index.json"), &index)
	check(err == nil, "index.json", err)
	for _, vector := range index.Deltas {
		delta := new(api.ObjectDelta)
		check(proto.Unmarshal(read(vector.Delta), delta) == nil, vector.Name, "is no message")
		made, err := object(read(vector.Held), delta)
		check((err != nil) == (vector.Error != ""), vector.Name, err)
		check(errors.Is(err, errWrongBase) == (vector.Error == "wrong_base"), vector.Name, err)
		check(err != nil || bytes.Equal(made, read(vector.Object)), vector.Name, "has other bytes")
	}
	for _, vector := range index.Chunks {
		made, err := events(read(vector.Chunk))
		check((err != nil) == (vector.Error != ""), vector.Name, err)
		check(err != nil || len(made) == len(vector.Events), vector.Name, "has another number of events")
		for i, want := range vector.Events {
			same := made[i].Namespace == want.Namespace && made[i].Name == want.Name && string(made[i].Object) == want.Object
			check(same && made[i].ResourceVersion == want.ResourceVersion, vector.Name, "has other events")
		}
	}
	fmt.Println("decoded", len(index.Deltas), "deltas and", len(index.Chunks), "chunks")
}

func check(good bool, what string, why any) {
	if !good {
		fmt.Println(what, why)
		os.Exit(1)
	}
}
