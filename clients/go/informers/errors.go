package informers

import (
	"context"
	"errors"
	"net/http"
	"time"

	"google.golang.org/grpc/codes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubefan "kubefan.dev/clients/go"
)

const (
	unavailable = codes.Unavailable
	expiredCode = codes.OutOfRange
)

// apiError converts an error to a kube-apiserver's error, because client-go decides by its code
// what to do. The error of a context stays as it is.
func apiError(err error) error {
	var failure *kubefan.Error
	if !errors.As(err, &failure) {
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return apierrors.NewInternalError(err)
	}
	code, reason := http.StatusInternalServerError, metav1.StatusReasonInternalError
	details := &metav1.StatusDetails{}
	switch {
	case failure.IsExpired():
		code, reason = http.StatusGone, metav1.StatusReasonExpired
	case failure.Reason == kubefan.ReasonTooLarge:
		code, reason = http.StatusGatewayTimeout, metav1.StatusReasonTimeout
		details.Causes = []metav1.StatusCause{{
			Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version",
		}}
	case failure.Reason == kubefan.ReasonNotSynced || failure.Code == codes.ResourceExhausted && failure.HasRetryAfter:
		// As an apiserver whose watch cache is not ready.
		code, reason = http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests
	case failure.Code == codes.InvalidArgument || failure.Code == codes.ResourceExhausted:
		code, reason = http.StatusBadRequest, metav1.StatusReasonBadRequest
		if failure.Field != "" {
			details.Causes = []metav1.StatusCause{{Field: failure.Field, Message: failure.Message}}
		}
	case failure.Code == codes.Unauthenticated:
		code, reason = http.StatusUnauthorized, metav1.StatusReasonUnauthorized
	case failure.Code == codes.PermissionDenied:
		code, reason = http.StatusForbidden, metav1.StatusReasonForbidden
	case failure.Code == codes.NotFound || failure.Code == codes.FailedPrecondition:
		code, reason = http.StatusNotFound, metav1.StatusReasonNotFound
	case failure.Code == codes.Unavailable:
		code, reason = http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable
	case failure.Code == codes.DeadlineExceeded:
		code, reason = http.StatusGatewayTimeout, metav1.StatusReasonTimeout
	}
	if failure.HasRetryAfter {
		details.RetryAfterSeconds = int32(min((failure.RetryAfter+time.Second-1)/time.Second, 1<<20))
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: failure.Error(), Details: details,
	}}
}
