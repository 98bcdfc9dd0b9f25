// The informer of client-go straight from the apiserver.
package main

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"kubefan.dev/clients/go/internal/measure"
)

var contentTypes = map[string]string{
	"straight-json":     runtime.ContentTypeJSON,
	"straight-protobuf": runtime.ContentTypeProtobuf,
}

func main() { measure.Run(source) }

func source(arguments measure.Arguments) (runtime.Object, cache.ListerWatcher, error) {
	content, found := contentTypes[arguments.Mode]
	if !found {
		return nil, nil, fmt.Errorf("%s is no mode", arguments.Mode)
	}
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: arguments.Address, BearerToken: arguments.Token, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAFile: arguments.CAFile},
		ContentConfig:   rest.ContentConfig{ContentType: content},
	})
	if err != nil {
		return nil, nil, err
	}
	pods := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "pods", "", fields.Everything())
	return &corev1.Pod{}, cache.ToListWatcherWithWatchListSemantics(pods, client), nil
}
