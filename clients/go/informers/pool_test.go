package informers

import (
	"strconv"
	"testing"
	"unsafe"

	corev1 "k8s.io/api/core/v1"
)

func TestObjectsShareTheStringsOfTheirMetadata(t *testing.T) {
	const content = `{"metadata":{"namespace":"team","labels":{"app":"web"},"ownerReferences":[{"kind":"ReplicaSet"}]}}`
	decode := decoderOf(&corev1.Pod{})
	var namespaces, keys, values, kinds []*byte
	for range 2 {
		object, err := decode.object([]byte(content), "1")
		if err != nil {
			t.Fatal(err)
		}
		pod := object.(*corev1.Pod)
		namespaces = append(namespaces, unsafe.StringData(pod.Namespace))
		kinds = append(kinds, unsafe.StringData(pod.OwnerReferences[0].Kind))
		for key, value := range pod.Labels {
			keys, values = append(keys, unsafe.StringData(key)), append(values, unsafe.StringData(value))
		}
	}
	for what, found := range map[string][]*byte{"namespace": namespaces, "key": keys, "value": values, "kind": kinds} {
		if len(found) != 2 || found[0] != found[1] {
			t.Errorf("each object has its own copy of a %s", what)
		}
	}
}

func TestAPoolStartsAgainWhenItIsFull(t *testing.T) {
	pool := newPool()
	for number := range 2 * pooledMax {
		text := strconv.Itoa(number)
		pool.one(&text)
		if len(pool.pooled) > pooledMax || text != strconv.Itoa(number) {
			t.Fatalf("%d strings after %s", len(pool.pooled), text)
		}
	}
}
