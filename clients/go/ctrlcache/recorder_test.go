package ctrlcache

import (
	"net/url"
	"testing"

	kubefan "kubefan.dev/clients/go"
)

func TestTheTargetIsReadFromThePathOfAList(t *testing.T) {
	rows := map[string]kubefan.Target{
		"/api/v1/pods":                {Version: "v1", Resource: "pods"},
		"/api/v1/namespaces":          {Version: "v1", Resource: "namespaces"},
		"/api/v1/namespaces/a/pods":   {Version: "v1", Resource: "pods", Namespace: "a"},
		"/apis/apps/v1/deployments":   {Group: "apps", Version: "v1", Resource: "deployments"},
		"/k8s/clusters/c/api/v1/pods": {Version: "v1", Resource: "pods"},
		"/apis/example.com/v1/apis":   {Group: "example.com", Version: "v1", Resource: "apis"},
		"/api/v1/pods?labelSelector=a%3Db&fieldSelector=spec.nodeName%3Dn": {
			Version: "v1", Resource: "pods", LabelSelector: "a=b", FieldSelector: "spec.nodeName=n",
		},
	}
	for path, want := range rows {
		from, err := url.Parse("https://h:1" + path)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := targetOf(from); err != nil || got != want {
			t.Errorf("%s: %+v %v", path, got, err)
		}
	}
	for _, path := range []string{"", "/api", "/api/v1", "/version", "/api/v1/namespaces/a/pods/x", "/api/v1/namespaces/a"} {
		if got, err := targetOf(&url.URL{Path: path}); err == nil {
			t.Errorf("%s became %+v", path, got)
		}
	}
}
