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

// Times of the election: short, because a test waits for a lease to run out; in the proportions of client-go's defaults.
const (
	leaseDuration = 6 * time.Second
	renewDeadline = 4 * time.Second
	retryPeriod   = 800 * time.Millisecond
)

// contend lets two candidates contend for a Lease, and stops whichever leads first without giving the Lease back, as if it had
// crashed. It prints who leads, and once the other has taken over, that, and after how long.
func contend(ctx context.Context, config *rest.Config, agent, lease string) error {
	namespace, name, ok := strings.Cut(lease, "/")
	if !ok {
		return fmt.Errorf("%q is no NAMESPACE/NAME", lease)
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
	first, err := next(ctx, leading)
	if err != nil {
		return err
	}
	if err := say(map[string]any{"leader": first}); err != nil {
		return err
	}
	// Long enough for renewals, which read the Lease and write it.
	select {
	case second := <-leading:
		return fmt.Errorf("%s leads while %s does", second, first)
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(leaseDuration):
	}
	stops[first]()
	start := time.Now()
	second, err := next(ctx, leading)
	if err != nil {
		return err
	}
	return say(map[string]any{"leader": second, "after": first, "seconds": time.Since(start).Seconds()})
}

func next(ctx context.Context, leading <-chan string) (string, error) {
	select {
	case identity := <-leading:
		return identity, nil
	case <-ctx.Done():
		return "", fmt.Errorf("nobody leads: %w", ctx.Err())
	}
}
