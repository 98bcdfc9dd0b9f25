package kubefan

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// DeltaBaseBytesMax is the default of WatchOptions.DeltaBaseBytesMax: 1 GiB.
const DeltaBaseBytesMax = 1 << 30

// WatchOptions are the options of a watch. The zero value starts with a snapshot.
type WatchOptions struct {
	// ResourceVersion: resume after this version, which is a WatchItem.ResumeVersion of the same
	// target, or the version of a list. Empty starts with a snapshot.
	ResourceVersion string
	// Cluster is the cluster of that version, from the list or the watch that returned it. The same
	// address may lead to another cluster one day, where the version would be meaningless.
	Cluster string
	// Timeout ends the watch, counted over all its connections. 0: no limit.
	Timeout time.Duration
	// BookmarkInterval is the silence after which the server sends a bookmark, if the version has
	// moved. 0: the server's default of 60 s. Minimum: 1 s.
	BookmarkInterval time.Duration
	// Projection is the parts of each object that are sent.
	Projection Projection
	// OnlyChanges leaves out changes that leave the projected bytes as they were. It needs a projection
	// that leaves something out, or deltas.
	OnlyChanges bool
	// Encoding is how objects are encoded on the wire. Event.Object is JSON, and protobuf with
	// EncodingProtobuf.
	Encoding Encoding
	// DeltaBaseBytesMax limits the copies that deltas need, in bytes. Above it the watch continues
	// without deltas. 0: 1 GiB.
	DeltaBaseBytesMax int
	// OnExpired is the reaction if history cannot resume from the version.
	OnExpired OnExpired
	// OnLag is the reaction if the stream has fallen behind the events that the server retains.
	OnLag OnLag
	// Fallback is the reaction while kubefan cannot be reached: FallbackPaced, the default, reads
	// from the client's apiserver, if it has one.
	Fallback Fallback
	// Backoff is the delays between retries.
	Backoff BackoffOptions
}

// check refuses options that no watch can have.
func (o WatchOptions) check(address string) error {
	return cmp.Or(
		o.Encoding.check(address, "WatchOptions.Encoding"),
		checkConstant(address, "WatchOptions.OnExpired", o.OnExpired, "OnExpiredRestart", "OnExpiredFail"),
		checkConstant(address, "WatchOptions.OnLag", o.OnLag, "OnLagConflate", "OnLagExpire"),
		checkConstant(address, "WatchOptions.Fallback", o.Fallback, "FallbackPaced", "FallbackNever"),
		o.Projection.check(address),
	)
}

// checkConstant refuses a value that is no constant of its type: they count from 0.
func checkConstant[T ~int](address, name string, value T, constants ...string) error {
	if 0 <= value && int(value) < len(constants) {
		return nil
	}
	message := fmt.Sprintf("%s is %d: the values are %s", name, value, strings.Join(constants, ", "))
	return &Error{Address: address, Code: codes.InvalidArgument, Message: message}
}

// ItemKind is the kind of a WatchItem.
type ItemKind int

const (
	// ItemEvent: an object was added, modified or deleted.
	ItemEvent ItemKind = iota
	// ItemSnapshotBegin: the events up to ItemSnapshotEnd are the complete state, and replace
	// everything that the caller knew. If the connection breaks inside, a snapshot starts again.
	ItemSnapshotBegin
	// ItemSnapshotEnd: the snapshot is complete.
	ItemSnapshotEnd
	// ItemGapBegin: kubefan had to list again, and the events up to ItemGapEnd lead to the state after
	// the gap. After a break inside, the gap may start again.
	ItemGapBegin
	// ItemGapEnd: the gap is complete.
	ItemGapEnd
	// ItemCatchUpBegin: the stream had fallen behind. The events up to ItemCatchUpEnd have each changed
	// object once, in its latest state.
	ItemCatchUpBegin
	// ItemCatchUpEnd: the catch-up is complete.
	ItemCatchUpEnd
	// ItemBookmark: only ResumeVersion has moved.
	ItemBookmark
	// ItemDisconnected: the connection broke, for the reason in Err. The watch retries by itself after
	// RetryIn. If a gap or a catch-up was not complete, the caller must undo its events, or hold such
	// events back until the end: an object that was added inside and has been deleted since is never
	// reported as deleted.
	ItemDisconnected
	// ItemReconnected: the connection is back. Nothing was lost, unless a mark says otherwise.
	ItemReconnected
	// ItemRestarted: kubefan refused the version, as Err says, so the watch asks for a snapshot. A
	// snapshot that kubefan sends by itself has only its ItemSnapshotBegin, with RestartedFrom.
	ItemRestarted
)

// String is the name of the kind, such as "SnapshotEnd".
func (k ItemKind) String() string {
	names := [...]string{
		"Event", "SnapshotBegin", "SnapshotEnd", "GapBegin", "GapEnd", "CatchUpBegin", "CatchUpEnd", "Bookmark",
		"Disconnected", "Reconnected", "Restarted",
	}
	if k < 0 || int(k) >= len(names) {
		return fmt.Sprintf("ItemKind(%d)", int(k))
	}
	return names[k]
}

// WatchItem is one item of a watch.
type WatchItem struct {
	Kind ItemKind
	// Event is set for ItemEvent, and nil otherwise. Its Object is the whole object, never a delta.
	Event *api.Event
	// ResumeVersion is the version to resume from after this item, with Cluster. It does not move
	// inside a snapshot, a gap or a catch-up. Empty before the end of the first snapshot. Send it back
	// as it is: it need not be a number, and "218.end" is after all events of 218.
	ResumeVersion string
	Cluster       string
	// ResourceVersion is that of a snapshot, or the version up to which the stream was exact before a
	// gap or a catch-up.
	ResourceVersion string
	// SnapshotCluster is the cluster of an ItemSnapshotBegin. Cluster becomes it at ItemSnapshotEnd.
	SnapshotCluster string
	// RestartedFrom is set for an ItemSnapshotBegin that replaces a failed resume.
	RestartedFrom string
	// Resource of an ItemSnapshotBegin, as kubefan resolved it.
	Resource *api.ResolvedResource
	// Reason of an ItemGapBegin, as in the label of kubefan_relists_total.
	Reason string
	// ObjectCount of an ItemSnapshotEnd.
	ObjectCount int64
	// Err of an ItemDisconnected or an ItemRestarted.
	Err error
	// RetryIn of an ItemDisconnected.
	RetryIn time.Duration
}

// String is the item in a few words, for logs and for people: "ADDED team-0/pod-0", "SnapshotEnd:
// 2 objects", "Disconnected: the reason; retry in 1.2s". It does not have the object. Its form may
// change. The item beside an error is "no item".
func (i WatchItem) String() string {
	switch i.Kind {
	case ItemEvent:
		if i.Event == nil {
			return "no item"
		}
		name := strings.TrimPrefix(i.Event.GetNamespace()+"/"+i.Event.GetName(), "/")
		return strings.TrimPrefix(i.Event.GetType().String(), "EVENT_TYPE_") + " " + name
	case ItemSnapshotEnd:
		return fmt.Sprintf("%s: %d objects", i.Kind, i.ObjectCount)
	case ItemGapBegin:
		return fmt.Sprintf("%s: %s", i.Kind, i.Reason)
	case ItemDisconnected:
		return fmt.Sprintf("%s: %v; retry in %s", i.Kind, i.Err, i.RetryIn.Round(time.Millisecond))
	case ItemRestarted:
		return fmt.Sprintf("%s: %v", i.Kind, i.Err)
	default:
		return i.Kind.String()
	}
}
