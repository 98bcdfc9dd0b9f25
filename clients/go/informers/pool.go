package informers

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

const (
	// pooledMax is the number of strings that a pool keeps. Then it starts again with none.
	pooledMax = 8192
	// pooledBytesMax is the longest string that is kept. Longer ones are rarely the same.
	pooledBytesMax = 128
)

// pool keeps one copy of the strings that many objects of a store have in their metadata, such as
// the keys of labels. Decoding makes a copy for each object, which is a large part of a small
// object.
type pool struct {
	mu     sync.Mutex
	pooled map[string]string
}

func newPool() *pool { return &pool{pooled: map[string]string{}} }

// share replaces strings of the metadata by equal ones that other objects have.
func (p *pool) share(object runtime.Object) {
	holder, ok := object.(metav1.ObjectMetaAccessor)
	if !ok {
		return
	}
	meta, ok := holder.GetObjectMeta().(*metav1.ObjectMeta)
	if !ok {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.one(&meta.Namespace)
	p.one(&meta.GenerateName)
	p.entries(meta.Labels)
	p.entries(meta.Annotations)
	for i := range meta.OwnerReferences {
		owner := &meta.OwnerReferences[i]
		p.one(&owner.APIVersion)
		p.one(&owner.Kind)
		p.one(&owner.Name)
		p.one((*string)(&owner.UID))
	}
	for i := range meta.ManagedFields {
		entry := &meta.ManagedFields[i]
		p.one(&entry.Manager)
		p.one(&entry.APIVersion)
		p.one(&entry.FieldsType)
		p.one(&entry.Subresource)
	}
}

func (p *pool) one(text *string) {
	if *text == "" || len(*text) > pooledBytesMax {
		return
	}
	if known, found := p.pooled[*text]; found {
		*text = known
		return
	}
	if len(p.pooled) >= pooledMax {
		clear(p.pooled)
	}
	p.pooled[*text] = *text
}

// entries replaces the keys, too: an assignment to a key of a map stores the new string.
func (p *pool) entries(of map[string]string) {
	for key, value := range of {
		p.one(&key)
		p.one(&value)
		of[key] = value
	}
}
