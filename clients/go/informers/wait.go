package informers

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
)

// waitInterval is how often a store is asked for its version.
const waitInterval = 10 * time.Millisecond

// Versioned is a store that knows its version, such as that of a shared informer (GetStore).
type Versioned interface {
	LastStoreSyncResourceVersion() string
}

// WaitUntil waits until the store has everything up to a version, such as that of your own write. With
// a selector, a write that does not match arrives only with the next bookmark, after up to a minute
// (WatchOptions.BookmarkInterval). Versions are comparable within one cluster and resource.
//
// It returns the error of ctx if that ends first; the write may still arrive.
func WaitUntil(ctx context.Context, store Versioned, version string) error {
	wanted := whole(version)
	if _, err := resourceversion.CompareResourceVersion(wanted, wanted); err != nil {
		return fmt.Errorf("resource version %q: %w", version, err)
	}
	return wait.PollUntilContextCancel(ctx, waitInterval, true, func(context.Context) (bool, error) {
		order, err := resourceversion.CompareResourceVersion(store.LastStoreSyncResourceVersion(), wanted)
		// Before the first state, the store has no version.
		return err == nil && order >= 0, nil
	})
}
