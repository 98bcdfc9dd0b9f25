package transport

import (
	"net/http"
	"net/url"
	"strings"
)

// read is a request that kubefan's caches may answer.
type read struct {
	form form
	// isWatch tells a watch from a list or a get.
	isWatch bool
	// hasState: the caller resumes from a version, so it has a state that it can wait with.
	hasState bool
	// isOnlyForKubefan: an apiserver may ignore a part of the request, and answer with too much.
	isOnlyForKubefan bool
}

// form has the parts of a read that decide whether kubefan has a cache for it.
type form struct {
	verb      string
	resource  resource
	namespace string
	accept    string
}

// resource names a resource in one API version.
type resource struct {
	group, version, name string
}

// router finds the reads among the requests to one apiserver.
type router struct {
	// base is the address of the apiserver, with the path of rest.Config.Host.
	base *url.URL
}

// readOf returns the read that a request is. It returns false for everything that goes to the
// apiserver itself: writes, consistent reads, subresources, impersonation, upgrades, paths that
// name no resource, and each request whose meaning this code does not know completely.
func (r router) readOf(request *http.Request) (read, bool) {
	if request.Method != http.MethodGet || hasBody(request) || actsAsAnother(request.Header) || isUpgrade(request.Header) {
		return read{}, false
	}
	path, ok := r.pathOf(request.URL)
	if !ok {
		return read{}, false
	}
	target, ok := parsePath(path)
	if !ok {
		return read{}, false
	}
	query, err := url.ParseQuery(request.URL.RawQuery)
	if err != nil || query.Has("pretty") {
		return read{}, false
	}
	isWatch := target.name == "" && isTrue(query, "watch")
	if !isWatch && !isFromAnyCache(query) {
		return read{}, false
	}
	version := query.Get("resourceVersion")
	return read{
		form: form{
			verb: verbOf(target.name, isWatch), resource: target.resource, namespace: target.namespace,
			accept: request.Header.Get("Accept"),
		},
		isWatch:          isWatch,
		hasState:         version != "" && version != "0",
		isOnlyForKubefan: query.Get("shardSelector") != "",
	}, true
}

// pathOf returns the path of a request behind that of the apiserver's address.
func (r router) pathOf(of *url.URL) (string, bool) {
	if of.Scheme != r.base.Scheme || of.Host != r.base.Host || of.RawPath != "" {
		return "", false
	}
	path, ok := strings.CutPrefix(of.Path, strings.TrimSuffix(r.base.Path, "/"))
	return path, ok && strings.HasPrefix(path, "/")
}

// isFromAnyCache tells whether a list or a get may be answered with a state that is not the latest.
// A page, and a list at exactly one version, need a state that a cache may no longer have.
func isFromAnyCache(query url.Values) bool {
	version, match := query.Get("resourceVersion"), query.Get("resourceVersionMatch")
	switch {
	case version == "" || query.Get("continue") != "":
		return false
	case match == "":
		// With a limit, a list from a version other than 0 is at exactly this version.
		return version == "0" || query.Get("limit") == "" || query.Get("limit") == "0"
	default:
		return match == "NotOlderThan"
	}
}

func verbOf(name string, isWatch bool) string {
	switch {
	case isWatch:
		return "watch"
	case name == "":
		return "list"
	default:
		return "get"
	}
}

// isTrue reads a parameter as the apiserver does: everything but 0 and false is true.
func isTrue(query url.Values, name string) bool {
	value := query.Get(name)
	return query.Has(name) && value != "0" && !strings.EqualFold(value, "false")
}

func hasBody(request *http.Request) bool {
	return request.Body != nil && request.Body != http.NoBody
}

// actsAsAnother tells whether a request impersonates: kubefan answers none of those from a cache.
func actsAsAnother(header http.Header) bool {
	for name := range header {
		if strings.HasPrefix(http.CanonicalHeaderKey(name), "Impersonate-") {
			return true
		}
	}
	return false
}

func isUpgrade(header http.Header) bool {
	return header.Get("Upgrade") != "" || strings.Contains(strings.ToLower(header.Get("Connection")), "upgrade")
}

// target is the collection or the object that a path names.
type target struct {
	resource  resource
	namespace string
	// name is empty for a collection.
	name string
}

// parsePath reads the path of a collection or of an object. Other paths, such as those of
// subresources and the deprecated ones with /watch/ and /proxy/, are none.
func parsePath(path string) (target, bool) {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	for _, part := range parts {
		if part == "" || part == "." || part == ".." {
			return target{}, false
		}
	}
	found := target{}
	switch {
	case parts[0] == "api" && len(parts) > 2:
		found.resource.version, parts = parts[1], parts[2:]
	case parts[0] == "apis" && len(parts) > 3:
		found.resource.group, found.resource.version, parts = parts[1], parts[2], parts[3:]
	default:
		return target{}, false
	}
	if parts[0] == "watch" || parts[0] == "proxy" {
		return target{}, false
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		found.namespace, parts = parts[1], parts[2:]
		if parts[0] == "status" || parts[0] == "finalize" {
			return target{}, false
		}
	}
	if len(parts) > 2 {
		return target{}, false
	}
	found.resource.name = parts[0]
	if len(parts) == 2 {
		found.name = parts[1]
	}
	return found, true
}
