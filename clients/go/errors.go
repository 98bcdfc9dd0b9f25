package kubefan

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is the error of a call.
type Error struct {
	// Address is the one that the caller gave to Connect.
	Address string
	// Code is the gRPC status code; InvalidArgument for wrong options, Unavailable without a
	// connection, DataLoss for a message that cannot be decoded, Internal for a server that does not
	// speak kubefan's protocol.
	Code codes.Code
	// Reason is the stable reason of kubefan's ErrorInfo. Empty if another server or the gRPC library
	// made the status.
	Reason string
	// Metadata is that of the ErrorInfo.
	Metadata map[string]string
	// Message is for people.
	Message string
	// Field is the invalid field of the request, such as "target.namespace". Usually empty.
	Field string
	// RetryAfter is the delay that the server asks for. HasRetryAfter tells 0 from none.
	RetryAfter    time.Duration
	HasRetryAfter bool
	// isProtocol: the server does not speak kubefan's protocol, so no retry can succeed.
	isProtocol bool
	// isSilent: there was no answer at all, on a connection that is there.
	isSilent bool
}

func (e *Error) Error() string {
	switch {
	case e.Reason != "":
		return e.Message
	case e.isProtocol:
		return fmt.Sprintf("%s does not speak kubefan's protocol: %s", e.Address, e.Message)
	case e.Code == codes.Unavailable:
		return fmt.Sprintf("cannot reach kubefan at %s: %s", e.Address, e.Message)
	default:
		return fmt.Sprintf("kubefan at %s: %s: %s", e.Address, e.Code, e.Message)
	}
}

// IsExpired tells whether history cannot resume from the requested version.
func (e *Error) IsExpired() bool { return e.Code == codes.OutOfRange && e.Reason != "" }

// IsRetryable tells whether the same call may succeed later.
func (e *Error) IsRetryable() bool {
	// Broken streams and proxies in between surface as Unknown, Internal or Canceled.
	retryable := []codes.Code{
		codes.Unavailable, codes.Unknown, codes.Internal, codes.Canceled, codes.Aborted, codes.DeadlineExceeded,
		codes.DataLoss,
	}
	return !e.isProtocol && (e.HasRetryAfter || slices.Contains(retryable, e.Code))
}

// IsExpired tells whether err says that history cannot resume from the requested version.
func IsExpired(err error) bool {
	var it *Error
	return errors.As(err, &it) && it.IsExpired()
}

// IsRetryable tells whether err says that the same call may succeed later.
func IsRetryable(err error) bool {
	var it *Error
	return errors.As(err, &it) && it.IsRetryable()
}

// errorOf converts the error of a call. Errors of this package stay as they are.
func errorOf(err error, address string) *Error {
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	state := status.Convert(err)
	made := &Error{Address: address, Code: state.Code(), Message: state.Message()}
	for _, detail := range state.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == ErrorDomain {
				made.Reason, made.Metadata = detail.Reason, detail.Metadata
			}
		case *errdetails.RetryInfo:
			made.RetryAfter, made.HasRetryAfter = max(detail.GetRetryDelay().AsDuration(), 0), true
		case *errdetails.BadRequest:
			if fields := detail.GetFieldViolations(); len(fields) > 0 {
				made.Field = fields[0].Field
			}
		}
	}
	if made.Reason == "" && made.Code == codes.Unimplemented && strings.Contains(made.Message, "404") {
		return protocolError("that port does not serve gRPC (HTTP status 404); is it kubefan's admin port?", address)
	}
	return made
}

// protocolError is the error of a server that is no kubefan. A retry cannot succeed.
func protocolError(problem, address string) *Error {
	return &Error{Address: address, Code: codes.Internal, Message: problem, isProtocol: true}
}
