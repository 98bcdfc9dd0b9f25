// The informer of client-go over kubefan.
package main

import (
	"context"
	"fmt"
	"log"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	kubefan "kubefan.dev/clients/go"
	"kubefan.dev/clients/go/informers"
	"kubefan.dev/clients/go/internal/measure"
)

func main() { measure.Run(source) }

func source(arguments measure.Arguments) (runtime.Object, cache.ListerWatcher, error) {
	client, err := kubefan.Connect(context.Background(), arguments.Address, kubefan.Options{
		CAFile: arguments.CAFile, Token: arguments.Token,
	})
	if err != nil {
		return nil, nil, err
	}
	var example runtime.Object = &corev1.Pod{}
	if arguments.Mode == "kubefan-metadata" {
		example = &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
	}
	made := informers.NewListWatch(client, "pods", "", example)
	made.OnError = func(err error) { log.Print(err) }
	switch arguments.Mode {
	case "kubefan-json":
	case "kubefan-protobuf":
		made.WatchOptions.Encoding = kubefan.EncodingProtobuf
	case "kubefan-metadata":
		made.WatchOptions.Projection.DropManagedFields, made.WatchOptions.OnlyChanges = true, true
	case "kubefan-fields":
		made.WatchOptions.OnlyChanges = true
		made.WatchOptions.Projection = kubefan.Projection{Fields: arguments.Paths, DropManagedFields: true}
	default:
		return nil, nil, fmt.Errorf("%s is no mode", arguments.Mode)
	}
	return example, made, nil
}
