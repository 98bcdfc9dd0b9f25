package apiserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	kubefan "kubefan.dev/clients/go"
)

var errNoVersion = errors.New("it has no version")

// status is what an apiserver says about an error.
type status struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
	Details struct {
		RetryAfterSeconds int `json:"retryAfterSeconds"`
	} `json:"details"`
}

func statusOf(response *http.Response, body []byte) status {
	made := status{}
	_ = json.Unmarshal(body, &made)
	made.Code = response.StatusCode
	if made.Message == "" {
		made.Message = response.Status
	}
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil {
		made.Details.RetryAfterSeconds = seconds
	}
	return made
}

// refusal converts an error of the apiserver to the one that kubefan would have.
func (s *server) refusal(of status, notFound string) *kubefan.Error {
	code, reason := codes.Unavailable, kubefan.ReasonUpstreamUnavailable
	switch of.Code {
	case http.StatusGone:
		code, reason = codes.OutOfRange, kubefan.ReasonTooOld
	case http.StatusUnauthorized:
		code, reason = codes.Unauthenticated, kubefan.ReasonUnauthenticated
	case http.StatusForbidden:
		code, reason = codes.PermissionDenied, kubefan.ReasonForbidden
	case http.StatusNotFound:
		code, reason = codes.NotFound, notFound
	case http.StatusTooManyRequests:
		code, reason = codes.ResourceExhausted, kubefan.ReasonLimitReached
	case http.StatusGatewayTimeout:
		// "Too large resource version", or a request that took too long.
	default:
		if of.Code < 500 {
			code, reason = codes.InvalidArgument, kubefan.ReasonInvalidArgument
		}
	}
	made := &kubefan.Error{
		Address: s.base, Code: code, Reason: reason,
		Message: fmt.Sprintf("the apiserver at %s answers %d: %s", s.base, of.Code, of.Message),
	}
	if seconds := of.Details.RetryAfterSeconds; seconds > 0 || of.Code == http.StatusTooManyRequests {
		made.HasRetryAfter, made.RetryAfter = true, time.Duration(max(seconds, 1))*time.Second
	}
	return made
}

// broken is the error of a connection.
func (s *server) broken(err error) *kubefan.Error {
	return s.failure("cannot reach it: " + err.Error())
}

// failure is an error that a retry may fix.
func (s *server) failure(problem string) *kubefan.Error {
	return &kubefan.Error{
		Address: s.base, Code: codes.Unavailable, Reason: kubefan.ReasonUpstreamUnavailable,
		Message: fmt.Sprintf("the apiserver at %s: %s", s.base, problem),
	}
}
