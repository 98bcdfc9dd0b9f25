// Watches pods: the state, then every change. Resumes after a break without losing one.
// go run . 127.0.0.1:7443
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

func main() {
	conn, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		panic(err)
	}
	request := &api.WatchRequest{Target: &api.Target{Resource: "pods"}}
	for ; ; time.Sleep(time.Second) {
		stream, err := api.NewWatchServiceClient(conn).Watch(context.Background(), request)
		for message := (*api.WatchResponse)(nil); err == nil; message, err = stream.Recv() {
			if event := message.GetEvent(); event != nil {
				fmt.Println(event.Type, event.Namespace+"/"+event.Name, event.ResourceVersion)
			}
			// The only version to resume from.
			request.ResourceVersion = cmp.Or(message.GetResumeVersion(), request.ResourceVersion)
		}
		if status.Code(err) == codes.OutOfRange {
			request.ResourceVersion = "" // expired: start with the state again
		}
		fmt.Println("RESUMING", request.ResourceVersion, err)
	}
}
