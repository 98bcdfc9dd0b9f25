package transport

import (
	"mime"
	"net/http"
	"slices"
	"strings"
)

// verdict is what an answer to a read says about kubefan.
type verdict int

const (
	// answered: the caller gets the answer. It is the cache's or the apiserver's.
	answered verdict = iota
	// uncached: the caller gets the answer. kubefan has passed the read on, perhaps as it has no
	// cache for it.
	uncached
	// unanswered: kubefan's 504 to a read that only a cache may answer. Its cache does not.
	unanswered
	// missing: kubefan's own 404. It has no cache for the read, and passes nothing on.
	missing
	// refused: kubefan's own 401 or 403. The apiserver may say otherwise.
	refused
	// busy: kubefan's own 429.
	busy
	// broken: kubefan's own 5xx, or that of something in front of it.
	broken
	// silent: no answer in time, of a kubefan that serves.
	silent
)

func (v verdict) String() string {
	return [...]string{"answered", "uncached", "unanswered", "missing", "refused", "busy", "broken", "silent"}[v]
}

// author is the server that has made an answer.
type author int

const (
	// unknown: no header tells. It is the apiserver's, kubefan's own or a proxy's.
	unknown author = iota
	ofCache
	ofKubefan
	ofApiserver
)

// verdictOf reads an answer.
func verdictOf(response *http.Response) verdict {
	by := authorOf(response.Header)
	status := response.StatusCode
	switch {
	case status == http.StatusGatewayTimeout && isOnlyIfCached(response.Header):
		return unanswered
	case status < 300 && by != ofCache:
		return uncached
	case status < 300 || by == ofApiserver:
		return answered
	case status == http.StatusTooManyRequests:
		return busy
	// A version that the state has not reached. Each server says so, and client-go knows what to
	// do. A gateway in front of a kubefan that hangs has another text.
	case status == http.StatusGatewayTimeout && isOfKubernetes(response.Header):
		return answered
	case status >= 500:
		return broken
	case by == ofCache:
		return answered
	case status == http.StatusNotFound:
		return missing
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		return refused
	default:
		return answered
	}
}

// authorOf returns the server that the headers of an answer name:
//
//   - Cache-Status (RFC 9211) "kubefan; hit" is of the cache. With the parameter fwd, kubefan has
//     passed the request on. With detail=only-if-cached it has no answer.
//   - Proxy-Status (RFC 9209) "kubefan; error=…" is of kubefan itself.
//   - X-Kubernetes-Pf-Flowschema-Uid is of the apiserver's priority and fairness. kubefan passes it
//     on.
//
// An older kubefan sends only the first one, and without fwd. Its own 401, 403, 404 and 5xx look
// like those of an apiserver without priority and fairness, or like those of a proxy.
func authorOf(header http.Header) author {
	if parameters, ok := memberOf(header, "Cache-Status"); ok {
		switch {
		case hasParameter(parameters, "fwd"):
			return ofApiserver
		case isOnlyIfCached(header):
			return ofKubefan
		default:
			return ofCache
		}
	}
	if parameters, ok := memberOf(header, "Proxy-Status"); ok && hasParameter(parameters, "error") {
		return ofKubefan
	}
	if header.Get("X-Kubernetes-Pf-Flowschema-Uid") != "" {
		return ofApiserver
	}
	return unknown
}

// isOnlyIfCached tells whether kubefan has no answer, and has forwarded nothing (docs/attach.md).
func isOnlyIfCached(header http.Header) bool {
	parameters, _ := memberOf(header, "Cache-Status")
	return slices.ContainsFunc(parameters, func(parameter string) bool {
		return strings.TrimSpace(parameter) == "detail="+onlyIfCached
	})
}

// isOfKubernetes tells whether the body of an error may be a Status.
func isOfKubernetes(header http.Header) bool {
	media, _, _ := mime.ParseMediaType(header.Get("Content-Type"))
	return media == "application/json" || media == "application/vnd.kubernetes.protobuf"
}

// memberOf returns the parameters of kubefan's member of a List (RFC 9651). The members of kubefan
// have no commas and semicolons in their values.
func memberOf(header http.Header, name string) ([]string, bool) {
	for member := range strings.SplitSeq(strings.Join(header.Values(name), ","), ",") {
		parts := strings.Split(member, ";")
		if strings.TrimSpace(parts[0]) == "kubefan" {
			return parts[1:], true
		}
	}
	return nil, false
}

func hasParameter(parameters []string, name string) bool {
	for _, parameter := range parameters {
		found, _, _ := strings.Cut(strings.TrimSpace(parameter), "=")
		if found == name {
			return true
		}
	}
	return false
}
