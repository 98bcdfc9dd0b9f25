// Command clients is a program that knows nothing of kubefan: client-go's informers of every kind, or a leader election, against
// whatever server a kubeconfig names. What it saw it prints as JSON, so that two runs against two servers can be compared.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "the cluster's `FILE`")
	agent := flag.String("agent", "clients", "what the User-Agent begins with")
	watchList := flag.Bool("watch-list", true, "whether informers begin with a watch, as client-go does unless told otherwise")
	contentType := flag.String("content-type", "", "what typed clients ask for; client-go's default unless given")
	group := flag.String("group", "", "the `GROUP` of the custom resource \"widgets\"")
	until := flag.String("until", "", "end when every informer has an object of this `NAME`")
	seconds := flag.Int("seconds", 300, "end after so long at the latest")
	elect := flag.String("elect", "", "instead of informers: let two candidates contend for this Lease, as `NAMESPACE/NAME`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, time.Duration(*seconds)*time.Second)
	defer cancel()
	// By the switch that client-go itself reads, before it reads it.
	if !*watchList {
		if err := os.Setenv("KUBE_FEATURE_WatchListClient", "false"); err != nil {
			log.Fatal(err)
		}
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	// The tests' writes are not to wait for their readers.
	config.QPS, config.Burst = 100, 200
	if *elect != "" {
		err = contend(ctx, config, *agent, *elect)
	} else {
		err = inform(ctx, config, *agent, *contentType, *group, *until)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// as is a client's configuration under a User-Agent of its own.
func as(config *rest.Config, agent string) *rest.Config {
	config = rest.CopyConfig(config)
	config.UserAgent = agent
	return config
}

// say prints one line of JSON.
func say(value any) error {
	return json.NewEncoder(os.Stdout).Encode(value)
}
