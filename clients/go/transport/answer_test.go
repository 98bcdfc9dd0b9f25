package transport

import (
	"net/http"
	"testing"
)

func TestWhatEachAnswerSaysAboutKubefan(t *testing.T) {
	hit := http.Header{"Cache-Status": {"kubefan; hit"}}
	passedOn := http.Header{"Cache-Status": {"kubefan; fwd=bypass"}}
	own := http.Header{"Proxy-Status": {"kubefan; error=http_request_denied"}}
	received := http.Header{"Proxy-Status": {"kubefan; received-status=403"}}
	onlyIfCached := http.Header{"Cache-Status": {"kubefan; detail=only-if-cached"}, "Content-Type": {"application/json"}}
	apiserver := http.Header{"X-Kubernetes-Pf-Flowschema-Uid": {"1"}}
	another := http.Header{"Cache-Status": {"cdn; hit, kubefan;hit"}}
	foreign := http.Header{"Cache-Status": {"cdn; hit"}}
	for _, row := range []struct {
		status int
		header http.Header
		want   verdict
	}{
		{200, hit, answered},
		{200, another, answered},
		{200, foreign, uncached},
		{200, nil, uncached},
		{200, apiserver, uncached},
		{200, passedOn, uncached},
		// An object that the cache does not have, a version that it no longer has, a bad selector.
		{404, hit, answered},
		{410, hit, answered},
		{410, nil, answered},
		{400, hit, answered},
		{400, nil, answered},
		{406, nil, answered},
		{422, nil, answered},
		// The caller's own.
		{401, passedOn, answered},
		{403, apiserver, answered},
		{404, apiserver, answered},
		// Perhaps kubefan's.
		{401, nil, refused},
		{403, nil, refused},
		{403, received, refused},
		{404, nil, missing},
		{401, own, refused},
		{403, own, refused},
		{404, own, missing},
		{429, nil, busy},
		{429, hit, busy},
		{429, own, busy},
		{429, apiserver, answered},
		// A drain, a bug, an apiserver that kubefan cannot reach, a proxy without kubefan.
		{503, hit, broken},
		{500, nil, broken},
		{502, nil, broken},
		{503, nil, broken},
		{503, own, broken},
		{508, nil, broken},
		{500, apiserver, answered},
		{503, passedOn, answered},
		// A version that is too large.
		{504, http.Header{"Content-Type": {"application/json"}}, answered},
		{504, http.Header{"Content-Type": {"application/vnd.kubernetes.protobuf; charset=utf-8"}}, answered},
		{504, http.Header{"Cache-Status": hit["Cache-Status"], "Content-Type": {"application/json"}}, answered},
		{504, apiserver, answered},
		{504, onlyIfCached, unanswered},
		{504, http.Header{"Cache-Status": {"cdn; detail=only-if-cached"}, "Content-Type": {"text/html"}}, broken},
		// A gateway's.
		{504, http.Header{"Content-Type": {"text/html"}}, broken},
		{504, nil, broken},
	} {
		if got := verdictOf(&http.Response{StatusCode: row.status, Header: row.header}); got != row.want {
			t.Errorf("%d %v: %v, not %v", row.status, row.header, got, row.want)
		}
	}
}
