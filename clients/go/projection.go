package kubefan

import (
	"google.golang.org/grpc/codes"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// Target selects objects, like the path and the query of a Kubernetes list request.
type Target struct {
	// Group and Version of the API. If both are empty, Resource may be any name that kubectl
	// accepts, such as "po" or "deployments.apps".
	Group   string
	Version string
	// Resource is the plural name, such as "pods".
	Resource string
	// Namespace limits the objects. Empty: all namespaces.
	Namespace string
	// Name selects one object. Empty: all names.
	Name string
	// LabelSelector is written as for kubectl: "app=web,tier!=db".
	LabelSelector string
	// FieldSelector is written as for kubectl: "spec.nodeName=n1".
	FieldSelector string
}

func (t Target) message() *api.Target {
	return &api.Target{
		Group: t.Group, Version: t.Version, Resource: t.Resource, Namespace: t.Namespace, Name: t.Name,
		LabelSelector: t.LabelSelector, FieldSelector: t.FieldSelector,
	}
}

// Projection selects the parts of each object that are sent. The zero value selects everything.
//
// If anything is left out, metadata.resourceVersion and metadata.managedFields are left out too. The
// version is in the event.
//
// A request fails with InvalidArgument, and nothing is sent, if Fields is empty but not nil, or if
// both Fields and MetadataOnly are set.
type Projection struct {
	// MetadataOnly sends a PartialObjectMetadata of meta.k8s.io/v1. Fields must be nil.
	MetadataOnly bool
	// Fields sends only these fields, such as "spec.nodeName". A path through a list applies to each
	// object in it: "spec.containers.image". A backslash makes a dot part of a name:
	// `metadata.annotations.example\.com/name`. At most 64 paths, of at most 1,024 bytes and 32 names.
	// nil sends all fields.
	Fields []string
	// DropManagedFields leaves metadata.managedFields out.
	DropManagedFields bool
	// DropLastApplied leaves the annotation of "kubectl apply" out.
	DropLastApplied bool
}

// IsFull tells whether every byte of an object is sent.
func (p Projection) IsFull() bool {
	return !p.MetadataOnly && p.Fields == nil && !p.DropManagedFields && !p.DropLastApplied
}

// check refuses projections that no request can have. An empty list may come from a program that
// has no field to ask for, and would otherwise receive everything.
func (p Projection) check(address string) error {
	wrong := &Error{Address: address, Code: codes.InvalidArgument, Field: "projection.paths"}
	switch {
	case p.Fields != nil && len(p.Fields) == 0:
		wrong.Message = "Projection.Fields has no field: name at least one, or leave Fields nil for whole objects"
	case p.Fields != nil && p.MetadataOnly:
		wrong.Message = "a Projection has either Fields or MetadataOnly: for a part of the metadata, set only " +
			"Fields, such as metadata.labels"
	default:
		return nil
	}
	return wrong
}

func (p Projection) message(onlyChanges bool) *api.Projection {
	if p.IsFull() && !onlyChanges {
		return nil
	}
	kind := api.ProjectionType_PROJECTION_TYPE_FULL
	switch {
	case p.Fields != nil:
		kind = api.ProjectionType_PROJECTION_TYPE_FIELD_MASK
	case p.MetadataOnly:
		kind = api.ProjectionType_PROJECTION_TYPE_METADATA
	}
	return &api.Projection{
		Type: kind, Paths: p.Fields, DropManagedFields: p.DropManagedFields, DropLastApplied: p.DropLastApplied,
		OnlyChanges: onlyChanges,
	}
}

// Encoding is the encoding of objects on the wire. Events always have whole objects: protobuf with
// EncodingProtobuf, JSON otherwise. Another value than these fails with InvalidArgument. The same
// holds for OnLag, OnExpired and Fallback.
type Encoding int

const (
	// EncodingJSON sends every object as JSON.
	EncodingJSON Encoding = iota
	// EncodingZstd sends snapshots in compressed chunks, and events as JSON.
	EncodingZstd
	// EncodingZstdDelta is experimental. It sends snapshots in compressed chunks, and an event as the
	// difference from the object's previous bytes. The watch keeps a copy of each object.
	EncodingZstdDelta
	// EncodingProtobuf sends every object as Kubernetes protobuf, as the apiserver sends it to
	// client-go: "k8s\x00" and a runtime.Unknown. kubefan has it for built-in types; the error of
	// any other says so. It needs a full Projection or MetadataOnly, which then has the whole
	// metadata.
	EncodingProtobuf
)

func (e Encoding) check(address, name string) error {
	return checkConstant(address, name, e, "EncodingJSON", "EncodingZstd", "EncodingZstdDelta", "EncodingProtobuf")
}

// message is the encoding of a request.
func (e Encoding) message() api.Encoding {
	switch e {
	case EncodingZstd:
		return api.Encoding_ENCODING_ZSTD
	case EncodingZstdDelta:
		return api.Encoding_ENCODING_ZSTD_DELTA
	case EncodingProtobuf:
		return api.Encoding_ENCODING_PROTOBUF
	default:
		return api.Encoding_ENCODING_UNSPECIFIED // EncodingJSON: no other value passes check.
	}
}

// OnLag is the action for a stream that has fallen behind the events that the server retains.
type OnLag int

const (
	// OnLagConflate continues with a marked catch-up, which has each changed object once.
	OnLagConflate OnLag = iota
	// OnLagExpire treats it as a version that has expired.
	OnLagExpire
)

// OnExpired is the action for a watch that cannot resume from its version, because that is too old
// or belongs to another history.
type OnExpired int

const (
	// OnExpiredRestart starts over with a snapshot.
	OnExpiredRestart OnExpired = iota
	// OnExpiredFail ends the watch with the error.
	OnExpiredFail
)

// Fallback is the action while kubefan cannot be reached.
type Fallback int

const (
	// FallbackPaced reads from the apiserver, within the budget, if the client has one
	// (Options.Apiserver). Otherwise it waits.
	FallbackPaced Fallback = iota
	// FallbackNever waits until kubefan is back. The apiserver gets no request.
	FallbackNever
)
