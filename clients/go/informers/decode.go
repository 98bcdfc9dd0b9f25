package informers

import (
	"fmt"
	"reflect"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
	"sigs.k8s.io/json"
)

// decoder makes objects of one type from JSON or protobuf.
type decoder struct {
	kind reflect.Type
	// readsProtobuf: the type has protobuf methods.
	readsProtobuf bool
	// gvk is that of the example. Empty for typed objects, which client-go's clients return without
	// one too.
	gvk            schema.GroupVersionKind
	isUnstructured bool
	isMetadata     bool
	pool           *pool
}

// protobufs decodes any type that has protobuf methods, as client-go's clients do. It needs no
// scheme: the type to decode to is always known.
var protobufs = func() *protobuf.Serializer {
	none := runtime.NewScheme()
	return protobuf.NewSerializer(none, none)
}()

func decoderOf(example runtime.Object) decoder {
	made := decoder{kind: reflect.TypeOf(example).Elem(), pool: newPool()}
	_, made.readsProtobuf = example.(interface {
		Reset()
		Unmarshal([]byte) error
	})
	switch example.(type) {
	case *unstructured.Unstructured:
		made.isUnstructured = true
	case *metav1.PartialObjectMetadata:
		made.isMetadata = true
	default:
		return made
	}
	made.gvk = example.GetObjectKind().GroupVersionKind()
	return made
}

// empty returns an object without content, such as for a bookmark.
func (d decoder) empty() runtime.Object {
	if d.isUnstructured {
		object := &unstructured.Unstructured{Object: map[string]any{}}
		object.SetGroupVersionKind(d.gvk)
		return object
	}
	object := reflect.New(d.kind).Interface().(runtime.Object)
	object.GetObjectKind().SetGroupVersionKind(d.gvk)
	return object
}

// object decodes JSON or protobuf as client-go does. A projection may have left the version and the
// kind out, so both are set.
func (d decoder) object(content []byte, version string) (runtime.Object, error) {
	object := d.empty()
	if isProtobuf, _, _ := protobufs.RecognizesData(content); isProtobuf {
		if _, _, err := protobufs.Decode(content, nil, object); err != nil {
			return nil, err
		}
	} else if holder, ok := object.(*unstructured.Unstructured); ok {
		var fields map[string]any
		if err := json.UnmarshalCaseSensitivePreserveInts(content, &fields); err != nil {
			return nil, err
		}
		if fields != nil {
			holder.Object = fields
		}
	} else if err := json.UnmarshalCaseSensitivePreserveInts(content, object); err != nil {
		return nil, err
	}
	if !d.isUnstructured || !d.gvk.Empty() {
		object.GetObjectKind().SetGroupVersionKind(d.gvk)
	}
	meta, err := apimeta.Accessor(object)
	if err != nil {
		return nil, err
	}
	meta.SetResourceVersion(version)
	d.pool.share(object)
	return object, nil
}

// event decodes the object of an event. A projection may have left its name out. A deletion is never
// lost: if its object cannot be decoded, only its metadata is known.
func (d decoder) event(event *api.Event) (runtime.Object, error) {
	object, err := d.object(event.GetObject(), event.GetResourceVersion())
	if err != nil {
		if event.GetType() != api.EventType_EVENT_TYPE_DELETED {
			return nil, fmt.Errorf("%s: %w", key(event.GetNamespace(), event.GetName()), err)
		}
		object = d.empty()
	}
	if err := identify(object, event.GetNamespace(), event.GetName(), event.GetUid(), event.GetResourceVersion()); err != nil {
		return nil, err
	}
	return object, nil
}

// identify sets the metadata that stores and caches use to find an object.
func identify(object runtime.Object, namespace, name, uid, version string) error {
	meta, err := apimeta.Accessor(object)
	if err != nil {
		return err
	}
	// Setting what is there already would allocate for an unstructured object.
	if meta.GetName() != name {
		meta.SetName(name)
	}
	if meta.GetNamespace() != namespace {
		meta.SetNamespace(namespace)
	}
	if string(meta.GetUID()) != uid {
		meta.SetUID(types.UID(uid))
	}
	if meta.GetResourceVersion() != version {
		meta.SetResourceVersion(version)
	}
	return nil
}

// bookmark returns the object of a bookmark.
func (d decoder) bookmark(version string, endsState bool) (runtime.Object, error) {
	object := d.empty()
	meta, err := apimeta.Accessor(object)
	if err != nil {
		return nil, err
	}
	meta.SetResourceVersion(version)
	if endsState {
		meta.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	return object, nil
}
