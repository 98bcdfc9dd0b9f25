package transport

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
)

func TestOnlyWatchesAndReadsOfAnyStateAreReads(t *testing.T) {
	const pods = "/api/v1/namespaces/a/pods"
	for request, want := range map[string]string{
		// Watches, whatever their version.
		"GET " + pods + "?watch=true":                                                                            "watch",
		"GET " + pods + "?watch=1&resourceVersion=0":                                                             "watch",
		"GET " + pods + "?watch=true&resourceVersion=7":                                                          "watch with state",
		"GET " + pods + "?watch=&resourceVersion=7":                                                              "watch with state",
		"GET " + pods + "?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan":                   "watch",
		"GET " + pods + "?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=7": "watch with state",
		"GET /apis/apps/v1/deployments?watch=true&labelSelector=a%3Db":                                           "watch",
		"GET /apis/apps/v1/deployments?watch=true&shardSelector=x":                                               "watch only for kubefan",
		// Reads with a version.
		"GET " + pods + "?resourceVersion=0":                                           "list",
		"GET " + pods + "?resourceVersion=0&limit=500":                                 "list",
		"GET " + pods + "?resourceVersion=7":                                           "list with state",
		"GET " + pods + "?resourceVersion=7&limit=0":                                   "list with state",
		"GET " + pods + "?resourceVersion=7&limit=5&resourceVersionMatch=NotOlderThan": "list with state",
		"GET " + pods + "?resourceVersion=0&watch=false":                               "list",
		"GET " + pods + "/p?resourceVersion=0":                                         "get",
		"GET /api/v1/namespaces/a?resourceVersion=0":                                   "get",
		"GET /api/v1/namespaces?resourceVersion=0":                                     "list",
		// Consistent reads, pages, and lists at exactly one version.
		"GET " + pods:                                                   "",
		"GET " + pods + "/p":                                            "",
		"GET " + pods + "?limit=500":                                    "",
		"GET " + pods + "?continue=x":                                   "",
		"GET " + pods + "?resourceVersion=0&continue=x":                 "",
		"GET " + pods + "?resourceVersion=7&limit=5":                    "",
		"GET " + pods + "?resourceVersion=7&resourceVersionMatch=Exact": "",
		"GET " + pods + "?resourceVersion=7&pretty=true":                "",
		"GET " + pods + "?resourceVersion=7;watch=1":                    "",
		// Writes, and methods that only look like reads.
		"POST " + pods:                          "",
		"DELETE " + pods + "?resourceVersion=0": "",
		"PATCH " + pods + "/p":                  "",
		"HEAD " + pods + "?resourceVersion=0":   "",
		// Subresources, and paths that name no resource.
		"GET " + pods + "/p/log?follow=true&resourceVersion=0": "",
		"GET " + pods + "/p/status?resourceVersion=0":          "",
		"GET /api/v1/namespaces/a/status?resourceVersion=0":    "",
		"GET /api/v1/watch/pods?resourceVersion=0":             "",
		"GET /api/v1/proxy/nodes/n?resourceVersion=0":          "",
		"GET /api?watch=true":                                  "",
		"GET /apis/apps/v1?watch=true":                         "",
		"GET /version?watch=true":                              "",
		"GET /openapi/v3?resourceVersion=0":                    "",
		"GET /api/v1//pods?watch=true":                         "",
		"GET /api/v1/pods/?watch=true":                         "",
		"GET /api/v1/namespaces/a%2Fb/pods?watch=true":         "",
		"GET /api/v1/namespaces/../pods?watch=true":            "",
	} {
		for _, base := range []string{"https://apiserver:6443", "https://apiserver:6443/", "https://apiserver:6443/clusters/c"} {
			if got := routed(t, base, request, nil); got != want {
				t.Errorf("%s at %s is %q, not %q", request, base, got, want)
			}
		}
	}
}

func TestARequestThatKubefanDoesNotPassOnIsNoRead(t *testing.T) {
	const watch = "GET /api/v1/pods?watch=true"
	const base = "https://apiserver:6443"
	for _, header := range []http.Header{
		{"Impersonate-User": {"u"}}, {"Impersonate-Extra-Scopes": {"s"}}, {"Impersonate-Uid": {"1"}},
		{"Connection": {"keep-alive, Upgrade"}}, {"Upgrade": {"websocket"}},
	} {
		if got := routed(t, base, watch, header); got != "" {
			t.Errorf("with %v it is %q", header, got)
		}
	}
	for _, other := range []string{"https://other:6443", "http://apiserver:6443", base + "/clusters/c"} {
		if got := routed(t, other, watch, nil); got == "" {
			t.Errorf("%s: its own requests are reads", other)
		}
		of, _ := url.Parse(other)
		request, _ := http.NewRequestWithContext(t.Context(), "GET", base+"/api/v1/pods?watch=true", nil)
		if _, isRead := (router{base: of}).readOf(request); isRead {
			t.Errorf("a request to %s is a read of the server %s", base, other)
		}
	}
}

func TestTheFormOfAReadTellsCachesApart(t *testing.T) {
	base, _ := url.Parse("https://apiserver:6443")
	request, _ := http.NewRequestWithContext(t.Context(), "GET", "https://apiserver:6443/apis/apps/v1/namespaces/a/deployments?watch=1", nil)
	request.Header.Set("Accept", "application/json")
	found, _ := router{base: base}.readOf(request)
	want := form{
		verb: "watch", resource: resource{group: "apps", version: "v1", name: "deployments"}, namespace: "a",
		accept: "application/json",
	}
	if found.form != want {
		t.Errorf("%+v", found.form)
	}
}

// routed returns what a request "METHOD path" to the server at base is, in words. Empty: no read.
func routed(t *testing.T, base, text string, header http.Header) string {
	t.Helper()
	method, path, _ := strings.Cut(text, " ")
	of, err := url.Parse(base)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), method, strings.TrimSuffix(base, "/")+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if header != nil {
		request.Header = header
	}
	found, isRead := router{base: of}.readOf(request)
	if !isRead {
		return ""
	}
	words := found.form.verb
	if found.hasState {
		words += " with state"
	}
	if found.isOnlyForKubefan {
		words += " only for kubefan"
	}
	return words
}
