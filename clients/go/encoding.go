package kubefan

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protodelim"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// contentBytesMax is the longest content of a chunk or a delta, in bytes: the limit of the contract.
const contentBytesMax = 64 << 20

var errWrongBase = errors.New("the delta is for other bytes than those held")

// plain decodes frames without a dictionary. It is shared, because a decoder is large; DecodeAll may
// be called from several goroutines.
var plain = sync.OnceValues(func() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderMaxMemory(contentBytesMax), zstd.WithDecoderConcurrency(0))
})

// decodeChunk returns the events of a SnapshotChunk.
func decodeChunk(frame []byte) ([]*api.Event, error) {
	decoder, err := plain()
	if err != nil {
		return nil, err
	}
	content, err := decoder.DecodeAll(frame, nil)
	if err != nil {
		return nil, fmt.Errorf("a snapshot chunk cannot be decompressed: %w", err)
	}
	var events []*api.Event
	for reader := bytes.NewReader(content); ; {
		event := new(api.Event)
		err := protodelim.UnmarshalOptions{MaxSize: contentBytesMax}.UnmarshalFrom(reader, event)
		switch {
		case errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
			return events, nil
		case err != nil:
			return nil, fmt.Errorf("a snapshot chunk cannot be decoded: %w", err)
		}
		events = append(events, event)
	}
}

// decodeDelta applies a delta to the bytes that are held. After an error those cannot be trusted.
func decodeDelta(held []byte, delta *api.ObjectDelta) ([]byte, error) {
	if crc32.ChecksumIEEE(held) != delta.GetBaseCrc32() {
		return nil, errWrongBase
	}
	// 0: the frame names no dictionary. The dictionary differs for each delta, and so does the decoder.
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderDictRaw(0, held), zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxMemory(contentBytesMax))
	if err != nil {
		return nil, err
	}
	defer decoder.Close()
	object, err := decoder.DecodeAll(delta.GetZstd(), nil)
	if err != nil {
		return nil, fmt.Errorf("a delta cannot be decompressed: %w", err)
	}
	return object, nil
}
