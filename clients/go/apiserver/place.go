package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"

	kubefan "kubefan.dev/clients/go"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

const acceptDiscovery = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"

// place is where a resource is served.
type place struct {
	group, version, resource string
	isClusterScoped          bool
}

// path is the path of a collection, or of one object.
func (p place) path(target kubefan.Target, name string) string {
	path := "/api/" + p.version
	if p.group != "" {
		path = "/apis/" + p.group + "/" + p.version
	}
	if target.Namespace != "" && !p.isClusterScoped {
		path += "/namespaces/" + url.PathEscape(target.Namespace)
	}
	path += "/" + p.resource
	if name != "" {
		path += "/" + url.PathEscape(name)
	}
	return path
}

func (p place) resolved(kind, apiVersion string) *api.ResolvedResource {
	if strings.HasPrefix(apiVersion, "meta.k8s.io/") {
		// The kind of metadata is not that of the objects.
		kind = ""
	}
	return &api.ResolvedResource{
		Group: p.group, Version: p.version, Resource: p.resource, Kind: kind, Namespaced: !p.isClusterScoped,
	}
}

// builtIn has the resources of each cluster that need no discovery: a program that starts while
// kubefan is away reads most often one of them.
var builtIn = map[string][]string{
	"/v1": {
		"configmaps", "endpoints", "events", "limitranges", "persistentvolumeclaims", "pods",
		"replicationcontrollers", "resourcequotas", "secrets", "serviceaccounts", "services",
	},
	"apps/v1":                {"controllerrevisions", "daemonsets", "deployments", "replicasets", "statefulsets"},
	"batch/v1":               {"cronjobs", "jobs"},
	"coordination.k8s.io/v1": {"leases"},
	"discovery.k8s.io/v1":    {"endpointslices"},
	"networking.k8s.io/v1":   {"ingresses", "networkpolicies"},
	"policy/v1":              {"poddisruptionbudgets"},
}

// builtInOfCluster has those that are not in namespaces.
var builtInOfCluster = map[string][]string{
	"/v1":               {"namespaces", "nodes", "persistentvolumes"},
	"storage.k8s.io/v1": {"csidrivers", "csinodes", "storageclasses", "volumeattachments"},
}

// place finds a resource: as kubefan has resolved it, as the target names it, among the built-in
// ones, or in the discovery documents.
func (s *server) place(ctx context.Context, read kubefan.ApiserverRead) (place, error) {
	if known := read.Resource; known.GetVersion() != "" {
		return place{
			group: known.GetGroup(), version: known.GetVersion(), resource: known.GetResource(),
			isClusterScoped: !known.GetNamespaced(),
		}, nil
	}
	target := read.Target
	if target.Group != "" || target.Version != "" {
		if target.Version != "" {
			return place{group: target.Group, version: target.Version, resource: target.Resource}, nil
		}
		return s.discovered(ctx, target.Resource+"."+target.Group)
	}
	return s.discovered(ctx, target.Resource)
}

// discovered finds a resource by a name that kubectl accepts.
func (s *server) discovered(ctx context.Context, name string) (place, error) {
	resource, group, _ := strings.Cut(strings.ToLower(name), ".")
	for isClusterScoped, table := range map[bool]map[string][]string{false: builtIn, true: builtInOfCluster} {
		for path, resources := range table {
			of, version, _ := strings.Cut(path, "/")
			if of == group && slices.Contains(resources, resource) {
				return place{group: of, version: version, resource: resource, isClusterScoped: isClusterScoped}, nil
			}
		}
	}
	s.mu.Lock()
	known, found := s.places[name]
	s.mu.Unlock()
	if found {
		return known, nil
	}
	// The core group comes first, then the groups in the server's order.
	for _, root := range []string{"/api", "/apis"} {
		body, err := s.get(ctx, root, acceptDiscovery, kubefan.ReasonResourceNotFound)
		if err != nil {
			return place{}, err
		}
		var groups groups
		if err := json.Unmarshal(body, &groups); err != nil {
			return place{}, s.failure(fmt.Sprintf("a discovery document that cannot be read: %v", err))
		}
		if made, found := groups.find(resource, group); found {
			s.mu.Lock()
			s.places[name] = made
			s.mu.Unlock()
			return made, nil
		}
	}
	return place{}, s.refusal(
		status{Code: 404, Message: fmt.Sprintf("it doesn't have a resource type %q", name)}, kubefan.ReasonResourceNotFound)
}

// groups is an APIGroupDiscoveryList.
type groups struct {
	Items []struct {
		Metadata struct {
			Name string `json:"name"`
		} `json:"metadata"`
		Versions []struct {
			Version   string       `json:"version"`
			Resources []discovered `json:"resources"`
		} `json:"versions"`
	} `json:"items"`
}

type discovered struct {
	Resource     string `json:"resource"`
	ResponseKind struct {
		Kind string `json:"kind"`
	} `json:"responseKind"`
	Scope      string   `json:"scope"`
	Singular   string   `json:"singularResource"`
	ShortNames []string `json:"shortNames"`
}

// find returns the resource with this name, or else with this short name. The rest of the name is a
// group, a part of one that begins it, or a version and a group.
func (g groups) find(resource, rest string) (place, bool) {
	short, hasShort := place{}, false
	for _, group := range g.Items {
		name := group.Metadata.Name
		for _, version := range group.Versions {
			if rest != "" && !strings.HasPrefix(name, rest) && rest != version.Version+"."+name {
				continue
			}
			for _, it := range version.Resources {
				made := place{
					group: name, version: version.Version, resource: it.Resource, isClusterScoped: it.Scope == "Cluster",
				}
				if it.Resource == resource || it.Singular == resource {
					return made, true
				}
				if !hasShort && slices.Contains(it.ShortNames, resource) {
					short, hasShort = made, true
				}
			}
		}
	}
	return short, hasShort
}
