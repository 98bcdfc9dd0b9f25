package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// Durations of the election, in the proportions of client-go's defaults. They are short, because
// the test waits for a lease to expire.
const (
	leaseDuration = 6 * time.Second
	renewDeadline = 4 * time.Second
	retryPeriod   = 800 * time.Millisecond
)

// contend runs two candidates for a Lease and stops the first leader without releasing the Lease,
// like a crash. It prints the first leader, and then the second leader and how long the takeover
// took.
func contend(ctx context.Context, config *rest.Config, agent, lease string) error {
	namespace, name, ok := strings.Cut(lease, "/")
	if !ok {
		return fmt.Errorf("%q is not NAMESPACE/NAME", lease)
	}
	leading := make(chan string)
	stops := make(map[string]context.CancelFunc)
	for _, identity := range []string{"one", "other"} {
		client, err := kubernetes.NewForConfig(as(config, agent+"-"+identity))
		if err != nil {
			return err
		}
		own, stop := context.WithCancel(ctx)
		defer stop()
		stops[identity] = stop
		elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: &resourcelock.LeaseLock{
				LeaseMeta:  metav1.ObjectMeta{Namespace: namespace, Name: name},
				Client:     client.CoordinationV1(),
				LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
			},
			LeaseDuration: leaseDuration,
			RenewDeadline: renewDeadline,
			RetryPeriod:   retryPeriod,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(context.Context) {
					select {
					case leading <- identity:
					case <-ctx.Done():
					}
				},
				OnStoppedLeading: func() {},
			},
		})
		if err != nil {
			return err
		}
		go elector.Run(own)
	}
	first, err := nextLeader(ctx, leading)
	if err != nil {
		return err
	}
	if err := printJSON(map[string]any{"leader": first}); err != nil {
		return err
	}
	// Long enough for renewals, which read and write the Lease.
	select {
	case second := <-leading:
		return fmt.Errorf("%s became leader while %s still leads", second, first)
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(leaseDuration):
	}
	stops[first]()
	start := time.Now()
	second, err := nextLeader(ctx, leading)
	if err != nil {
		return err
	}
	return printJSON(map[string]any{"leader": second, "after": first, "seconds": time.Since(start).Seconds()})
}

func nextLeader(ctx context.Context, leading <-chan string) (string, error) {
	select {
	case identity := <-leading:
		return identity, nil
	case <-ctx.Done():
		return "", fmt.Errorf("no candidate became leader: %w", ctx.Err())
	}
}
