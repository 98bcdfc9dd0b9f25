package contract

import (
	"fmt"
	"net"
	"strconv"
	"sync"
	"syscall"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
)

// A server answers lists and watches as the script says, and logs the requests.
type server struct {
	log       *log
	watchList bool
	// Requests are logged.
	requests bool

	mutex   sync.Mutex
	version string
	objects []*object
	// Objects in a page of a list. 0: the client's limit has no effect.
	page int
	// The script sends the initial events of a watch-list itself.
	manual    bool
	failList  []string
	failWatch []string
	watch     *watch.FakeWatcher
}

// The reflector asks a lister-watcher in this way for its support of watch-lists.
func (s *server) IsWatchListSemanticsUnSupported() bool { return !s.watchList }

var resource = schema.GroupResource{Resource: "things"}

func failure(kind string) *apierrors.StatusError {
	switch kind {
	case "expired":
		return apierrors.NewResourceExpired("too old resource version")
	case "too-large":
		err := apierrors.NewTimeoutError("Too large resource version: 100, current: 10", 1)
		cause := metav1.StatusCause{Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version"}
		err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, cause)
		return err
	case "too-many-requests":
		return apierrors.NewTooManyRequests("try again later", 1)
	case "internal":
		return apierrors.NewInternalError(fmt.Errorf("broken"))
	case "unavailable":
		return apierrors.NewServiceUnavailable("starting")
	case "forbidden":
		return apierrors.NewForbidden(resource, "", fmt.Errorf("no"))
	case "invalid":
		return apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil)
	}
	panic("unknown failure " + kind)
}

// takeFailure returns the next failure that the script has prepared.
func takeFailure(failures *[]string) error {
	if len(*failures) == 0 {
		return nil
	}
	kind := (*failures)[0]
	*failures = (*failures)[1:]
	switch kind {
	case "none":
		return nil
	case "refused":
		return &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	}
	return failure(kind)
}

func shown(version string) string {
	if version == "" {
		return "none"
	}
	return version
}

func (s *server) List(options metav1.ListOptions) (runtime.Object, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	request := "list rv=" + shown(options.ResourceVersion)
	if options.Limit != 0 {
		request += fmt.Sprintf(" limit=%d", options.Limit)
	}
	if options.Continue != "" {
		request += " continue=" + options.Continue
	}
	if s.requests {
		s.log.add("server", "%s", request)
	}
	if err := takeFailure(&s.failList); err != nil {
		return nil, err
	}
	list := &metav1.PartialObjectMetadataList{}
	list.ResourceVersion = s.version
	start, end := 0, len(s.objects)
	if options.Continue != "" {
		start, _ = strconv.Atoi(options.Continue)
	}
	if s.page != 0 && options.Limit != 0 && start+s.page < end {
		end = start + s.page
		list.Continue = strconv.Itoa(end)
	}
	for _, object := range s.objects[start:end] {
		list.Items = append(list.Items, *object.DeepCopy())
	}
	return list, nil
}

func (s *server) Watch(options metav1.ListOptions) (watch.Interface, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	request := "watch"
	snapshot := options.SendInitialEvents != nil && *options.SendInitialEvents
	if snapshot {
		request = "watch-list"
	}
	request += " rv=" + shown(options.ResourceVersion)
	if !options.AllowWatchBookmarks {
		request += " without-bookmarks"
	}
	if snapshot != (options.ResourceVersionMatch == metav1.ResourceVersionMatchNotOlderThan) {
		request += " match=" + string(options.ResourceVersionMatch)
	}
	if timeout := options.TimeoutSeconds; timeout == nil || *timeout < 300 || *timeout > 600 {
		request += " wrong-timeout"
	}
	if s.requests {
		s.log.add("server", "%s", request)
	}
	if err := takeFailure(&s.failWatch); err != nil {
		return nil, err
	}
	s.watch = watch.NewFakeWithChanSize(1000, false)
	if snapshot && !s.manual {
		for _, object := range s.objects {
			s.watch.Add(object.DeepCopy())
		}
		s.watch.Action(watch.Bookmark, bookmark(s.version, true))
	}
	return s.watch, nil
}

func bookmark(version string, initialEnd bool) *object {
	bookmark := &object{}
	bookmark.ResourceVersion = version
	if initialEnd {
		bookmark.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	return bookmark
}

// step executes the steps that concern the server. The second result is false for another step.
func (s *server) step(command string, arguments []string) bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	switch command {
	case "state":
		s.version = arguments[0]
		s.objects = nil
		for _, text := range arguments[1:] {
			s.objects = append(s.objects, parse(text))
		}
	case "pages":
		s.page, _ = strconv.Atoi(arguments[0])
	case "manual-snapshot":
		s.manual = true
	case "fail-list":
		s.failList = append(s.failList, arguments...)
	case "fail-watch":
		s.failWatch = append(s.failWatch, arguments...)
	case "end-watch":
		s.watch.Stop()
	case "event":
		s.event(arguments[0], arguments[1:])
	default:
		return false
	}
	return true
}

func (s *server) event(kind string, arguments []string) {
	if s.watch == nil || s.watch.IsStopped() {
		s.log.add("server", "no watch")
		return
	}
	switch kind {
	case "added":
		s.watch.Add(parse(arguments[0]))
	case "modified":
		s.watch.Modify(parse(arguments[0]))
	case "deleted":
		s.watch.Delete(parse(arguments[0]))
	case "bookmark":
		s.watch.Action(watch.Bookmark, bookmark(arguments[0], false))
	case "initial-end":
		s.watch.Action(watch.Bookmark, bookmark(arguments[0], true))
	case "unreadable":
		s.watch.Action(watch.Modified, &metav1.Status{})
	case "error":
		status := failure(arguments[0]).ErrStatus
		s.watch.Error(&status)
	default:
		panic("unknown event " + kind)
	}
}
