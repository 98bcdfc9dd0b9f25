package contract

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

type object = metav1.PartialObjectMetadata

const colors = "colors"

// parse reads the notation of an object: namespace/name@version, then #uid, then =colour+colour.
func parse(text string) *object {
	object := &object{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Thing"}}
	if rest, values, found := strings.Cut(text, "="); found {
		text = rest
		object.Annotations = map[string]string{colors: values}
	}
	if rest, uid, found := strings.Cut(text, "#"); found {
		text = rest
		object.UID = types.UID("uid-" + uid)
	}
	key, version, _ := strings.Cut(text, "@")
	object.ResourceVersion = version
	namespace, name, err := cache.SplitMetaNamespaceKey(key)
	must(err)
	object.Namespace, object.Name = namespace, name
	return object
}

// format writes an object in the notation that parse reads.
func format(value any) string {
	accessor, err := meta.Accessor(value)
	must(err)
	key, err := cache.MetaNamespaceKeyFunc(value)
	must(err)
	text := key + "@" + accessor.GetResourceVersion()
	if uid := accessor.GetUID(); uid != "" {
		text += "#" + strings.TrimPrefix(string(uid), "uid-")
	}
	if values := accessor.GetAnnotations()[colors]; values != "" {
		text += "=" + values
	}
	return text
}

func formatAll(values []any) string {
	texts := make([]string, 0, len(values))
	for _, value := range values {
		texts = append(texts, format(value))
	}
	slices.Sort(texts)
	return words(texts)
}

func words(texts []string) string {
	if len(texts) == 0 {
		return "nothing"
	}
	return strings.Join(texts, " ")
}

func sorted(texts []string) string {
	texts = slices.Clone(texts)
	slices.Sort(texts)
	return words(texts)
}

// formatDeleted writes an object or the marker of a missed deletion.
func formatDeleted(value any) string {
	tombstone, ok := value.(cache.DeletedFinalStateUnknown)
	switch {
	case !ok:
		return format(value)
	case tombstone.Obj == nil:
		return tombstone.Key + " unknown"
	default:
		if inner, ok := tombstone.Obj.(cache.DeletedFinalStateUnknown); ok {
			return formatDeleted(inner) + " nested"
		}
		return format(tombstone.Obj) + " unknown"
	}
}

func parseAll(texts []string) []any {
	objects := []any{}
	for _, text := range texts {
		objects = append(objects, parse(text))
	}
	return objects
}

// indexers has the index functions that scripts name.
func indexers(name string) cache.Indexers {
	functions := map[string]cache.IndexFunc{
		"color": func(value any) ([]string, error) {
			accessor, err := meta.Accessor(value)
			must(err)
			values := accessor.GetAnnotations()[colors]
			return strings.FieldsFunc(values, func(r rune) bool { return r == '+' }), nil
		},
		"namespace": cache.MetaNamespaceIndexFunc,
	}
	return cache.Indexers{name: functions[name]}
}

// option returns the value of "name=value" among the arguments.
func option(arguments []string, name string) (string, bool) {
	for _, argument := range arguments {
		if key, value, _ := strings.Cut(argument, "="); key == name {
			return value, true
		}
	}
	return "", false
}

func durationOption(arguments []string, name string) *time.Duration {
	text, found := option(arguments, name)
	if !found {
		return nil
	}
	duration, err := time.ParseDuration(text)
	must(err)
	return &duration
}

func outcome(err error) []string {
	if err != nil {
		return []string{"refused"}
	}
	return nil
}

// transform returns a function that appends a colour, so that a second pass over the same object
// shows. It refuses the object whose key is named.
func transform(fail string) cache.TransformFunc {
	return func(value any) (any, error) {
		accessor, err := meta.Accessor(value)
		must(err)
		if key := accessor.GetNamespace() + "/" + accessor.GetName(); key == fail {
			return nil, fmt.Errorf("cannot transform %s", key)
		}
		annotations := map[string]string{colors: "seen"}
		if before := accessor.GetAnnotations()[colors]; before != "" {
			annotations[colors] = before + "+seen"
		}
		accessor.SetAnnotations(annotations)
		return value, nil
	}
}
