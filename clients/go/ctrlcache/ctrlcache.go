// Package ctrlcache lets the cache of a controller-runtime manager read from a kubefan. Reads are shed
// from the apiserver; writes, discovery and everything else still go to it.
//
// Only the source of the informers is replaced. So every option of the cache keeps its meaning:
// ByObject with its selectors and namespaces, DefaultTransform, UnsafeDisableDeepCopy, NewInformer.
// Bookmarks are always on, because they cost nothing here.
package ctrlcache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	kubefan "kubefan.dev/clients/go"
	"kubefan.dev/clients/go/informers"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// Options are the settings of NewCache. The zero value reads every type from kubefan.
type Options struct {
	// Direct, if set, tells which types are read from the apiserver, such as those that kubefan does
	// not cache.
	Direct func(schema.GroupVersionKind) bool
	// Configure, if set, is called with the source of each informer, before its first request. It may
	// set a projection, an encoding or OnError. The target already has the namespace and the selectors
	// of the cache.
	Configure func(schema.GroupVersionKind, *informers.ListWatch)
}

// NewCache returns the function for manager.Options.NewCache and cluster.Options.NewCache. The caller
// closes the client after the manager has ended.
func NewCache(kube *kubefan.Client, options Options) cache.NewCacheFunc {
	return func(config *rest.Config, cacheOptions cache.Options) (cache.Cache, error) {
		if cacheOptions.HTTPClient == nil {
			made, err := rest.HTTPClientFor(config)
			if err != nil {
				return nil, fmt.Errorf("the HTTP client of the cache: %w", err)
			}
			cacheOptions.HTTPClient = made
		}
		if cacheOptions.Scheme == nil {
			cacheOptions.Scheme = scheme.Scheme
		}
		recording := *cacheOptions.HTTPClient
		recording.Transport = recorder{next: recording.Transport}
		cacheOptions.HTTPClient = &recording

		newInformer := cacheOptions.NewInformer
		if newInformer == nil {
			newInformer = toolscache.NewSharedIndexInformer
		}
		known := cacheOptions.Scheme
		cacheOptions.NewInformer = func(
			direct toolscache.ListerWatcher, object runtime.Object, resync time.Duration, indexers toolscache.Indexers,
		) toolscache.SharedIndexInformer {
			kind, err := apiutil.GVKForObject(object, known)
			if err != nil || options.Direct != nil && options.Direct(kind) {
				return newInformer(direct, object, resync, indexers)
			}
			source := &source{
				direct: toolscache.ToListerWatcherWithContext(direct), client: kube, object: object,
				configure: func(made *informers.ListWatch) {
					if options.Configure != nil {
						options.Configure(kind, made)
					}
				},
			}
			return newInformer(source, object, resync, indexers)
		}
		return cache.New(config, cacheOptions)
	}
}

// source reads from kubefan instead of the apiserver, in place of the cache's own source.
type source struct {
	direct    toolscache.ListerWatcherWithContext
	client    *kubefan.Client
	object    runtime.Object
	configure func(*informers.ListWatch)

	mu   sync.Mutex
	made *informers.ListWatch
}

// listWatch finds out the request of the cache, once: its namespace and its selectors are nowhere
// else to be seen.
func (s *source) listWatch(ctx context.Context) (*informers.ListWatch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.made != nil {
		return s.made, nil
	}
	record := &record{}
	_, err := s.direct.ListWithContext(context.WithValue(ctx, recordKey{}, record), metav1.ListOptions{})
	if record.url == nil {
		return nil, fmt.Errorf("the request of the cache is unknown: %w", errors.Join(err, errNotRecorded))
	}
	target, err := targetOf(record.url)
	if err != nil {
		return nil, err
	}
	made := informers.NewListWatch(s.client, target.Resource, target.Namespace, s.object)
	made.Target = target
	s.configure(made)
	s.made = made
	return made, nil
}

func (s *source) List(options metav1.ListOptions) (runtime.Object, error) {
	return s.ListWithContext(context.Background(), options)
}

func (s *source) Watch(options metav1.ListOptions) (watch.Interface, error) {
	return s.WatchWithContext(context.Background(), options)
}

func (s *source) ListWithContext(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	made, err := s.listWatch(ctx)
	if err != nil {
		return nil, err
	}
	return made.ListWithContext(ctx, options)
}

func (s *source) WatchWithContext(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	made, err := s.listWatch(ctx)
	if err != nil {
		return nil, err
	}
	return made.WatchWithContext(ctx, options)
}

// IsWatchListSemanticsUnSupported tells client-go that a watch may start with the state.
func (s *source) IsWatchListSemanticsUnSupported() bool { return false }

// WaitUntil waits until the cache has everything of the object's type up to a version, such as that of
// your own write: see informers.WaitUntil. The type must be cached for all namespaces or for one.
func WaitUntil(ctx context.Context, from cache.Cache, object client.Object, version string) error {
	informer, err := from.GetInformer(ctx, object)
	if err != nil {
		return err
	}
	shared, ok := informer.(interface{ GetStore() toolscache.Store })
	if !ok {
		return fmt.Errorf("%T has no single store", informer)
	}
	return informers.WaitUntil(ctx, shared.GetStore(), version)
}
