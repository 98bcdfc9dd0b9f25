// Writes an OCI image layout with one image for each platform. It decides what deploy/Dockerfile
// decides for container engines: the files of the image, its user and its command. Nothing in the
// layout depends on the machine or on the time, so equal inputs give equal digests.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// A number, because the image has no /etc/passwd and Kubernetes' runAsNonRoot needs one.
const user = "65532:65532"

// Variant of every 64-bit ARM processor, as containerd and Kubernetes name it.
const arm64Variant = "v8"

// The contents of the image beside the binary, by path.
type files map[string][]byte

type options struct {
	// Paths of the binaries, by architecture as Go calls it.
	binaries pairs
	files    pairs
	labels   pairs
	created  int64
	output   string
}

// A flag NAME=VALUE that may be repeated.
type pairs map[string]string

func (p pairs) String() string { return "" }

func (p pairs) Set(text string) error {
	name, value, found := strings.Cut(text, "=")
	if !found || name == "" || value == "" {
		return fmt.Errorf("%q is not NAME=VALUE", text)
	}
	p[name] = value
	return nil
}

func main() {
	given := options{binaries: pairs{}, files: pairs{}, labels: pairs{}}
	flag.Var(given.binaries, "binary", "`ARCH=PATH` of a static Linux binary; repeat it for each of amd64 and arm64")
	flag.Var(given.files, "file", "`IMAGE_PATH=PATH` of a further file; may be repeated")
	flag.Var(given.labels, "label", "`NAME=VALUE`; may be repeated")
	flag.Int64Var(&given.created, "created", 0, "`SECONDS` since 1970: the time of the image and of its files")
	flag.StringVar(&given.output, "output", "", "`DIR` of the layout, which must not exist")
	flag.Parse()
	if err := run(given); err != nil {
		fmt.Fprintln(os.Stderr, "image-layout:", err)
		os.Exit(1)
	}
}

func run(given options) error {
	if len(given.binaries) == 0 || given.output == "" || flag.NArg() > 0 {
		return errors.New("needs --binary and --output, and no other argument")
	}
	if _, err := os.Stat(given.output); err == nil {
		return fmt.Errorf("%s exists", given.output)
	}
	further, err := read(given.files)
	if err != nil {
		return err
	}
	var index v1.ImageIndex = mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range slices.Sorted(maps.Keys(given.binaries)) {
		image, err := imageFor(arch, further, given)
		if err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
		if err := report(arch, image); err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        image,
			Descriptor: v1.Descriptor{Platform: platform(arch)},
		})
	}
	if err := write(index, given); err != nil {
		return err
	}
	// As a registry's client will read it.
	written, err := layout.ImageIndexFromPath(given.output)
	if err != nil {
		return err
	}
	if err := validate.Index(written); err != nil {
		return err
	}
	digest, err := index.Digest()
	if err != nil {
		return err
	}
	fmt.Println(digest)
	return nil
}

func platform(arch string) *v1.Platform {
	platform := v1.Platform{OS: "linux", Architecture: arch}
	if arch == "arm64" {
		platform.Variant = arm64Variant
	}
	return &platform
}

func read(paths pairs) (files, error) {
	contents := files{}
	for name, file := range paths {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		contents[strings.TrimPrefix(path.Clean(name), "/")] = content
	}
	return contents, nil
}

func imageFor(arch string, further files, given options) (v1.Image, error) {
	binary, err := os.ReadFile(given.binaries[arch])
	if err != nil {
		return nil, err
	}
	if err := isStatic(arch, binary); err != nil {
		return nil, fmt.Errorf("%s: %w", given.binaries[arch], err)
	}
	// The binary has a layer of its own: the other files stay the same in most releases.
	created := time.Unix(given.created, 0).UTC()
	image, err := mutate.ConfigFile(mutate.MediaType(empty.Image, types.OCIManifestSchema1), &v1.ConfigFile{
		Architecture: arch,
		Variant:      platform(arch).Variant,
		OS:           "linux",
		Created:      v1.Time{Time: created},
		RootFS:       v1.RootFS{Type: "layers"},
		Config: v1.Config{
			User:         user,
			Entrypoint:   []string{"/kubefan"},
			Cmd:          []string{"serve"},
			WorkingDir:   "/",
			ExposedPorts: map[string]struct{}{"7443/tcp": {}, "7444/tcp": {}},
			Labels:       given.labels,
		},
	})
	if err != nil {
		return nil, err
	}
	image = mutate.ConfigMediaType(image, types.OCIConfigJSON)
	for _, part := range []struct {
		name  string
		files files
	}{{"certificates and licenses", further}, {"kubefan", files{"kubefan": binary}}} {
		if len(part.files) == 0 {
			continue
		}
		layer, err := layerOf(part.files, created)
		if err != nil {
			return nil, err
		}
		history := v1.History{Created: v1.Time{Time: created}, CreatedBy: "release/image", Comment: part.name}
		image, err = mutate.Append(image, mutate.Addendum{Layer: layer, History: history, MediaType: types.OCILayer})
		if err != nil {
			return nil, err
		}
	}
	return image, nil
}

func layerOf(contents files, modified time.Time) (v1.Layer, error) {
	var archive bytes.Buffer
	writer := tar.NewWriter(&archive)
	made := map[string]bool{".": true}
	for _, name := range slices.Sorted(maps.Keys(contents)) {
		if err := makeParents(writer, name, made, modified); err != nil {
			return nil, err
		}
		header := tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(contents[name])), Mode: 0o444, ModTime: modified}
		if name == "kubefan" {
			header.Mode = 0o555
		}
		if err := writer.WriteHeader(&header); err != nil {
			return nil, err
		}
		if _, err := writer.Write(contents[name]); err != nil {
			return nil, err
		}
	}
	if err := writer.Close(); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithCompressionLevel(gzip.BestCompression), tarball.WithMediaType(types.OCILayer))
}

func makeParents(writer *tar.Writer, name string, made map[string]bool, modified time.Time) error {
	parent := path.Dir(name)
	if made[parent] {
		return nil
	}
	if err := makeParents(writer, parent, made, modified); err != nil {
		return err
	}
	made[parent] = true
	return writer.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: parent + "/", Mode: 0o755, ModTime: modified})
}

// Writes the layout. Its index.json has one entry, the index of all platforms, as `crane push` and
// `skopeo copy` expect.
func write(index v1.ImageIndex, given options) error {
	written, err := layout.Write(given.output, empty.Index)
	if err != nil {
		return err
	}
	name := map[string]string{"org.opencontainers.image.ref.name": given.labels["org.opencontainers.image.version"]}
	return written.AppendIndex(index, layout.WithAnnotations(name))
}

// Tells the size of what a node pulls and of what it stores.
func report(arch string, image v1.Image) error {
	layers, err := image.Layers()
	if err != nil {
		return err
	}
	var pulled, stored int64
	for _, layer := range layers {
		size, err := layer.Size()
		if err != nil {
			return err
		}
		content, err := layer.Uncompressed()
		if err != nil {
			return err
		}
		unpacked, err := io.Copy(io.Discard, content)
		if err != nil {
			return errors.Join(err, content.Close())
		}
		if err := content.Close(); err != nil {
			return err
		}
		pulled, stored = pulled+size, stored+unpacked
	}
	digest, err := image.Digest()
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "linux/%s: %s, %.1f MB compressed, %.1f MB unpacked\n", arch, digest, float64(pulled)/1e6, float64(stored)/1e6)
	return nil
}
