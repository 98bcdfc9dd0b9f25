package transport

import (
	"bytes"
	"context"
	"io"
	"net/http"
)

// healthPath is gRPC's health service, which kubefan serves on its data port to callers without a
// token.
const healthPath = "/grpc.health.v1.Health/Check"

var (
	// healthRequest is a gRPC message without content: it asks about the server as a whole.
	healthRequest = []byte{0, 0, 0, 0, 0}
	// healthServing is a gRPC message with the field status: SERVING.
	healthServing = []byte{0, 0, 0, 0, 2, 0x08, 0x01}
)

// probe asks kubefan for its health. A server in front of kubefan that speaks only HTTP/1.1 cannot
// pass the question on: there, any answer but a 5xx is enough.
func (c *connection) probe(ctx context.Context) bool {
	address := *c.base
	address.Path += healthPath
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, address.String(), bytes.NewReader(healthRequest))
	if err != nil {
		return false
	}
	request.Header.Set("Content-Type", "application/grpc")
	request.Header.Set("TE", "trailers")
	response, err := c.bare.RoundTrip(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<10))
	if response.ProtoMajor < 2 {
		return response.StatusCode < 500
	}
	return err == nil && response.Trailer.Get("Grpc-Status") == "0" && bytes.Equal(body, healthServing)
}
