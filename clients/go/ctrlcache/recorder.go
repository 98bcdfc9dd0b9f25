package ctrlcache

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	kubefan "kubefan.dev/clients/go"
)

var (
	errRecorded    = errors.New("recorded, not sent")
	errNotRecorded = errors.New("no request was made")
)

// recordKey is the context key of a record.
type recordKey struct{}

// record is the request that was not sent.
type record struct{ url *url.URL }

// recorder sends requests, except those whose context has a record.
type recorder struct{ next http.RoundTripper }

func (r recorder) RoundTrip(request *http.Request) (*http.Response, error) {
	if it, ok := request.Context().Value(recordKey{}).(*record); ok {
		it.url = request.URL
		return nil, errRecorded
	}
	return transportOr(r.next).RoundTrip(request)
}

// WrappedRoundTripper lets client-go find the transport below.
func (r recorder) WrappedRoundTripper() http.RoundTripper { return transportOr(r.next) }

// targetOf reads the path and the query of a list: PREFIX/api/v1/… or PREFIX/apis/GROUP/VERSION/…,
// then namespaces/NAMESPACE/ if there is one, then the resource. The prefix is that of a proxy.
func targetOf(from *url.URL) (kubefan.Target, error) {
	unknown := fmt.Errorf("%s is not the path of a list", from.Path)
	target := kubefan.Target{
		LabelSelector: from.Query().Get("labelSelector"), FieldSelector: from.Query().Get("fieldSelector"),
	}
	parts := strings.Split(strings.Trim(from.Path, "/"), "/")
	if at := slices.Index(parts, "apis"); at >= 0 && len(parts) > at+3 {
		target.Group, target.Version, parts = parts[at+1], parts[at+2], parts[at+3:]
	} else if at := slices.Index(parts, "api"); at >= 0 && len(parts) > at+2 {
		target.Version, parts = parts[at+1], parts[at+2:]
	} else {
		return kubefan.Target{}, unknown
	}
	if len(parts) == 3 && parts[0] == "namespaces" {
		target.Namespace, parts = parts[1], parts[2:]
	}
	if len(parts) != 1 || parts[0] == "" {
		return kubefan.Target{}, unknown
	}
	target.Resource = parts[0]
	return target, nil
}

// transportOr is http.DefaultTransport for a client that names none.
func transportOr(next http.RoundTripper) http.RoundTripper {
	if next == nil {
		return http.DefaultTransport
	}
	return next
}
