// Command clients runs informers of client-go of every kind, or a leader election, against the
// server of a kubeconfig, or single lists and watches. It knows nothing of kubefan. It prints its
// observations as JSON, so that runs against two servers can be compared.
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
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig `FILE` of the cluster")
	agent := flag.String("agent", "clients", "prefix of the User-Agent")
	watchList := flag.Bool("watch-list", true, "whether informers start with a watch, which is client-go's default")
	contentType := flag.String("content-type", "", "content type of typed clients; client-go's default if empty")
	group := flag.String("group", "", "the `GROUP` of the custom resource \"widgets\"")
	until := flag.String("until", "", "exit when every informer has seen an object with this `NAME`")
	seconds := flag.Int("seconds", 300, "time limit in seconds")
	pods := flag.Bool("pods", false, "instead, run one informer of pods until the pod -until was created and deleted")
	elect := flag.String("elect", "", "instead of informers, let two candidates contend for this Lease, `NAMESPACE/NAME`")
	versions := flag.Bool("versions", false, "instead, run one dynamic informer of -resources and print each version of its store")
	resources := flag.String("resources", "", "the `RESOURCE.VERSION.GROUP` for -versions")
	measured := flag.Bool("measure", false, "instead, run one informer of pods and take a benchmark's orders on stdin")
	decoded := flag.String("decode", "", "instead, run the lists and watches of this `TASK` in JSON, and print what they read")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, time.Duration(*seconds)*time.Second)
	defer cancel()
	// client-go reads this switch itself, so set it first.
	if !*watchList {
		if err := os.Setenv("KUBE_FEATURE_WatchListClient", "false"); err != nil {
			log.Fatal(err)
		}
	}
	if *decoded != "" {
		if err := decode(ctx, *decoded); err != nil {
			log.Fatal(err)
		}
		return
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	// Client-side throttling must not delay the requests.
	config.QPS, config.Burst = 100, 200
	switch {
	case *elect != "":
		err = contend(ctx, config, *agent, *elect)
	case *pods:
		err = recordPods(ctx, config, *agent, *until)
	case *versions:
		err = followVersions(ctx, config, *agent, *resources)
	case *measured:
		err = measure(ctx, config, *contentType)
	default:
		err = inform(ctx, config, *agent, *contentType, *group, *until)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// as returns a copy of config with its own User-Agent.
func as(config *rest.Config, agent string) *rest.Config {
	config = rest.CopyConfig(config)
	config.UserAgent = agent
	return config
}

// printJSON prints one line of JSON.
func printJSON(value any) error {
	return json.NewEncoder(os.Stdout).Encode(value)
}
