package apiserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	kubefan "kubefan.dev/clients/go"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

// identity is what every object has.
type identity struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name            string `json:"name"`
		Namespace       string `json:"namespace"`
		UID             string `json:"uid"`
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
}

func identityOf(content []byte) (identity, error) {
	made := identity{}
	err := json.Unmarshal(content, &made)
	if err == nil && made.Metadata.ResourceVersion == "" {
		err = errNoVersion
	}
	return made, err
}

func (i identity) object(content []byte) *api.Object {
	return &api.Object{
		Namespace: i.Metadata.Namespace, Name: i.Metadata.Name, Uid: i.Metadata.UID,
		ResourceVersion: i.Metadata.ResourceVersion, Object: content,
	}
}

func trimmed(content []byte) []byte { return bytes.TrimSpace(content) }

// withKind gives an item of a list the kind that it has in a watch: a list leaves it out.
func withKind(item []byte, known, kind, apiVersion string) []byte {
	if known != "" || kind == "" {
		return item
	}
	item = trimmed(item)
	head, _ := json.Marshal(map[string]string{"kind": kind})
	version, _ := json.Marshal(map[string]string{"apiVersion": apiVersion})
	made := bytes.NewBuffer(make([]byte, 0, len(item)+len(head)+len(version)))
	made.Write(head[:len(head)-1])
	made.WriteByte(',')
	made.Write(version[1 : len(version)-1])
	if len(item) > len("{}") {
		made.WriteByte(',')
	}
	made.Write(item[1:])
	return made.Bytes()
}

// field is a field of an object, with its bytes.
type field struct {
	name  string
	value json.RawMessage
}

// fieldsOf returns the fields of an object in their order; false if the value is no object.
func fieldsOf(value []byte) ([]field, bool, error) {
	decoder := json.NewDecoder(bytes.NewReader(value))
	if first, err := decoder.Token(); err != nil || first != json.Delim('{') {
		return nil, false, err
	}
	var made []field
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return nil, false, err
		}
		found := field{name: name.(string)}
		if err := decoder.Decode(&found.value); err != nil {
			return nil, false, err
		}
		made = append(made, found)
	}
	return made, true, nil
}

func objectOf(fields []field) ([]byte, error) {
	made := bytes.NewBufferString("{")
	for at, it := range fields {
		if at > 0 {
			made.WriteByte(',')
		}
		name, err := json.Marshal(it.name)
		if err != nil {
			return nil, err
		}
		made.Write(name)
		made.WriteByte(':')
		made.Write(it.value)
	}
	made.WriteByte('}')
	return made.Bytes(), nil
}

// change replaces the value of a field, or leaves it out if the change returns nil.
func change(value []byte, name string, change func([]byte) ([]byte, error)) ([]byte, error) {
	fields, isObject, err := fieldsOf(value)
	if err != nil || !isObject {
		return value, err
	}
	kept := fields[:0]
	for _, it := range fields {
		if it.name == name {
			if it.value, err = change(it.value); err != nil {
				return nil, err
			}
		}
		if it.value != nil {
			kept = append(kept, it)
		}
	}
	return objectOf(kept)
}

func drop([]byte) ([]byte, error) { return nil, nil }

// project leaves out of an object what kubefan would leave out.
func project(content []byte, projection kubefan.Projection) ([]byte, error) {
	if projection.IsFull() {
		return content, nil
	}
	content, err := change(content, "metadata", func(metadata []byte) ([]byte, error) {
		for _, name := range []string{"resourceVersion", "managedFields"} {
			var err error
			if metadata, err = change(metadata, name, drop); err != nil {
				return nil, err
			}
		}
		if !projection.DropLastApplied {
			return metadata, nil
		}
		return change(metadata, "annotations", func(annotations []byte) ([]byte, error) {
			kept, err := change(annotations, lastApplied, drop)
			if string(kept) == "{}" {
				return nil, err
			}
			return kept, err
		})
	})
	if err != nil || projection.Fields == nil {
		return content, err
	}
	mask := mask{}
	for _, path := range projection.Fields {
		names, err := namesOf(path)
		if err != nil {
			return nil, err
		}
		mask.add(names)
	}
	picked, err := mask.pick(content)
	if err == nil && picked == nil {
		picked = []byte("{}")
	}
	return picked, err
}

// mask has the fields to keep: a nil mask keeps the whole value.
type mask map[string]mask

func (m mask) add(names []string) {
	below, found := m[names[0]]
	switch {
	case len(names) == 1:
		m[names[0]] = nil
	case found && below == nil:
		// A shorter path keeps all of it.
	case found:
		below.add(names[1:])
	default:
		below = mask{}
		m[names[0]] = below
		below.add(names[1:])
	}
}

// pick returns what the mask keeps of a value; nil for nothing.
func (m mask) pick(value []byte) ([]byte, error) {
	if m == nil {
		return value, nil
	}
	if len(value) > 0 && value[0] == '[' {
		return m.pickEach(value)
	}
	fields, isObject, err := fieldsOf(value)
	if err != nil || !isObject {
		return nil, err
	}
	kept := fields[:0]
	for _, it := range fields {
		below, found := m[it.name]
		if !found {
			continue
		}
		if it.value, err = below.pick(it.value); err != nil {
			return nil, err
		}
		if it.value != nil {
			kept = append(kept, it)
		}
	}
	if len(kept) == 0 {
		return nil, nil
	}
	return objectOf(kept)
}

// pickEach picks from each object in a list. An object with nothing to keep stays as an empty one.
func (m mask) pickEach(value []byte) ([]byte, error) {
	var items []json.RawMessage
	if err := json.Unmarshal(value, &items); err != nil {
		return nil, err
	}
	var kept [][]byte
	for _, item := range items {
		if len(item) == 0 || item[0] != '{' {
			continue
		}
		picked, err := m.pick(item)
		if err != nil {
			return nil, err
		}
		if picked == nil {
			picked = []byte("{}")
		}
		kept = append(kept, picked)
	}
	if len(kept) == 0 {
		return nil, nil
	}
	return fmt.Appendf(nil, "[%s]", bytes.Join(kept, []byte(","))), nil
}

var errPath = errors.New("is no path of fields; write it like spec.nodeName")

// namesOf splits a path at its dots. A backslash makes a dot or a backslash part of a name.
func namesOf(path string) ([]string, error) {
	var names []string
	name := strings.Builder{}
	for at := 0; at < len(path); at++ {
		switch {
		case path[at] == '\\' && at+1 < len(path) && (path[at+1] == '.' || path[at+1] == '\\'):
			at++
			name.WriteByte(path[at])
		case path[at] == '\\':
			return nil, fmt.Errorf("%q %w", path, errPath)
		case path[at] == '.':
			names = append(names, name.String())
			name.Reset()
		default:
			name.WriteByte(path[at])
		}
	}
	names = append(names, name.String())
	for _, it := range names {
		if it == "" {
			return nil, fmt.Errorf("%q %w", path, errPath)
		}
	}
	return names, nil
}
