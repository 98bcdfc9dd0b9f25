package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"kubefan.dev/clients/go/internal/cluster"
)

// The programs of the pages: of README.md, docs/ and the READMEs of the clients. A block is a
// program, or the body of a function with ctx, client, config and clientset. A block is left out
// after "<!-- excerpt: REASON -->".

const (
	repository   = "../../.."
	readme       = "clients/go/README.md"
	guide        = "docs/clients-go.md"
	pagesAddress = "127.0.0.1:7443"
	// firstLinesMax is more than the lines of the first program of a page, from its package clause on.
	firstLinesMax = 20
	// printedAtMost bounds the wait for the output of a program.
	printedAtMost = 90 * time.Second
)

// elsewhere are pages whose programs other tests run.
var elsewhere = map[string]string{
	"docs/integrations/controller-runtime.md": "tests/integration/integrations/operator.rs",
}

// printed is the output of each program. A program without output is only compiled: it starts
// something that the next block needs, or needs a server with a certificate.
var printed = map[string][][]string{
	readme: {
		{`SnapshotBegin <nil>\nADDED team-0/pod-0 <nil>\nADDED team-0/pod-1 <nil>\nSnapshotEnd: 2 objects <nil>\n`},
		nil, nil, nil, nil,
	},
	guide: {
		{`ADDED team-0/pod-0 <nil>\nADDED team-0/pod-1 <nil>\nSnapshotEnd: 2 objects <nil>\n`, `MODIFIED team-0/pod-0 <nil>\n`},
		{`ADDED pod-0 \{.*"uid"`, `the state is complete: 2`},
		{`2 pods at version \d+`, `one of them: \{.*"pod-0"`, `since then: EVENT_TYPE_MODIFIED pod-0 <nil>`},
		{`new: pod-0`, `new: pod-1`, `changed: pod-0`},
		{`2 pods <nil>`},
		{`2 pods <nil>`},
		{`2 pods from protobuf <nil>`},
		nil,
		nil,
		{`pod-0 \{"status":\{"phase":"Pending"\}\} <nil>`},
		{`start over: `},
		nil,
		{`NotFound OBJECT_NOT_FOUND false`},
		{`2 pods from kubefan`},
	},
}

// imported are the packages that bodies may name.
var imported = map[string]string{
	"apiserver": "kubefan.dev/clients/go/apiserver",
	"cache":     "k8s.io/client-go/tools/cache", "clientgoinformers": "k8s.io/client-go/informers",
	"corev1": "k8s.io/api/core/v1", "ctrl": "sigs.k8s.io/controller-runtime",
	"ctrlcache": "kubefan.dev/clients/go/ctrlcache", "errors": "errors", "fmt": "fmt",
	"informers": "kubefan.dev/clients/go/informers", "labels": "k8s.io/apimachinery/pkg/labels", "log": "log",
	"schema": "k8s.io/apimachinery/pkg/runtime/schema", "time": "time",
	"transport": "kubefan.dev/clients/go/transport",
}

const bodiesMain = `package main

import (
	"context"
	"log"
	"os"
	"strconv"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	kubefan "kubefan.dev/clients/go"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

type body func(context.Context, *kubefan.Client, *rest.Config, kubernetes.Interface) error

// Arguments: the number of the body, the address of kubefan, the kubeconfig of the apiserver.
func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	// Managers would serve their metrics on port 8080, which may be in use.
	metricsserver.DefaultBindAddress = "0"
	number, err := strconv.Atoi(os.Args[1])
	if err != nil {
		return err
	}
	client, err := kubefan.Connect(context.Background(), os.Args[2], kubefan.Options{})
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", os.Args[3])
	if err != nil {
		return err
	}
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	return bodies[number](context.Background(), client, config, clientset)
}
`

func pageBlocks(t *testing.T, page, language string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, page))
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?sm)^(<!-- excerpt: [^\n]+ -->\n)?```" + language + "\n(.*?)^```$")
	var found []string
	for _, match := range block.FindAllSubmatch(text, -1) {
		if len(match[1]) == 0 {
			found = append(found, string(match[2]))
		}
	}
	return found
}

// programs are the blocks in Go of all pages but those of elsewhere.
func programs(t *testing.T) map[string][]string {
	t.Helper()
	pages := []string{"README.md"}
	for _, directory := range []string{"docs", "clients"} {
		err := fs.WalkDir(os.DirFS(repository), directory, func(path string, entry fs.DirEntry, err error) error {
			if entry != nil && entry.Name() == "node_modules" {
				return fs.SkipDir
			}
			if strings.HasSuffix(path, ".md") {
				pages = append(pages, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	found := map[string][]string{}
	for _, page := range pages {
		if blocks := pageBlocks(t, page, "go"); len(blocks) > 0 {
			found[page] = blocks
		}
	}
	for page, test := range elsewhere {
		if _, err := os.Stat(filepath.Join(repository, test)); err != nil || len(found[page]) == 0 {
			t.Error(page, test, err)
		}
		delete(found, page)
	}
	return found
}

func isProgram(block string) bool { return strings.HasPrefix(block, "package main\n") }

func TestEveryProgramOfEveryPageIsTestedAndFormatted(t *testing.T) {
	counts, expected := map[string]int{}, map[string]int{}
	for page, blocks := range programs(t) {
		counts[page] = len(blocks)
		for number, block := range blocks {
			formatted, err := format.Source([]byte(block))
			if err != nil || string(formatted) != block {
				t.Errorf("%s, block %d is not as gofmt writes it: %v\n%s", page, number, err, formatted)
			}
		}
	}
	for page, blocks := range printed {
		expected[page] = len(blocks)
	}
	if !maps.Equal(counts, expected) {
		t.Fatal("what is printed is known of ", expected, ", and there are ", counts)
	}
	for _, page := range []string{readme, guide} {
		first := programs(t)[page][0]
		if lines := strings.Count(first, "\n"); lines >= firstLinesMax || !isProgram(first) {
			t.Errorf("%s: %d lines in the first program, imports included:\n%s", page, lines, first)
		}
	}
}

func TestThePagesNameTheVersionsThatGoModHas(t *testing.T) {
	required, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	// The row of a page, and the line of go.mod.
	rows := map[string]string{
		"| Go |": `(?m)^go (1\.\d+)`, "| client-go, for `informers` |": `k8s\.io/client-go v((0\.\d+)\.\d+)\n`,
		"| controller-runtime, for `ctrlcache` |": `controller-runtime v((0\.\d+)\.\d+)\n`,
	}
	for _, page := range []string{readme, guide} {
		text, err := os.ReadFile(filepath.Join(repository, page))
		if err != nil {
			t.Fatal(err)
		}
		for row, line := range rows {
			found := regexp.MustCompile(line).FindSubmatch(required)
			want := fmt.Sprintf("%s %s or later; tested with %s", row, found[len(found)-1], found[1])
			if !bytes.Contains(text, []byte(want)) {
				t.Errorf("%s does not have %q", page, want)
			}
		}
	}
}

// The programs of the pages print the right lines. Only the paths and the addresses are those of
// the test.
func TestTheProgramsOfThePagesRun(t *testing.T) {
	control := cluster.Start(t)
	fan := control.StartKubefan(t, "", "--resource", "pods")
	keepChanging(t, control.Client)

	inAnEmptyProject := t.TempDir()
	shell := func(script string) {
		t.Helper()
		command := exec.Command("sh", "-euc", script)
		command.Dir = inAnEmptyProject
		if out, err := command.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
	}
	module, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	// The checksums of the modules, which Go would otherwise ask a server for.
	sums, err := os.ReadFile(filepath.Join(module, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(inAnEmptyProject, "go.sum"), sums, 0o600); err != nil {
		t.Fatal(err)
	}
	commands := pageBlocks(t, readme, "sh")
	if inGuide := pageBlocks(t, guide, "sh"); inGuide[0] != commands[0] {
		t.Error("the guide installs otherwise than the README: ", inGuide[0])
	}
	shell(strings.ReplaceAll(commands[0], "/path/to/kubefan/clients/go", module))
	// The commands after the one that starts kubefan.
	run := commands[2]

	var bodies []string
	pages := programs(t)
	for _, page := range slices.Sorted(maps.Keys(pages)) {
		for number, block := range pages[page] {
			expected := printed[page][number]
			if !isProgram(block) {
				bodies = append(bodies, block)
				continue
			}
			block = strings.ReplaceAll(block, pagesAddress, fan.Address)
			if err := os.WriteFile(filepath.Join(inAnEmptyProject, "main.go"), []byte(block), 0o600); err != nil {
				t.Fatal(err)
			}
			// Built, to be ended by its process ID.
			shell(strings.ReplaceAll(run, "go run .", "go build -o program ."))
			prints(t, fmt.Sprint(page, ", block ", number), expected, filepath.Join(inAnEmptyProject, "program"))
		}
	}
	names, err := os.ReadFile(filepath.Join(inAnEmptyProject, "go.mod"))
	if err != nil || strings.Contains(string(names), "k8s.io") {
		t.Errorf("a program without informers gets them: %s %v", names, err)
	}

	built := buildBodies(t, module, bodies)
	at := 0
	for _, page := range slices.Sorted(maps.Keys(pages)) {
		for number, block := range pages[page] {
			if isProgram(block) {
				continue
			}
			if expected := printed[page][number]; expected != nil {
				prints(t, fmt.Sprint(page, ", block ", number), expected, built, fmt.Sprint(at), fan.Address, control.Kubeconfig)
			}
			at++
		}
	}
}

// keepChanging makes two pods, and changes the first one until the test ends.
func keepChanging(t *testing.T, client kubernetes.Interface) {
	t.Helper()
	namespace := "team-0"
	_, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	api := client.CoreV1().Pods(namespace)
	for number := range 2 {
		made := pod(number)
		made.Namespace, made.Labels["app"] = namespace, "web-0"
		if _, err := api.Create(t.Context(), made, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(func() { stop(); <-done })
	go func() {
		defer close(done)
		changes := time.NewTicker(pollEvery)
		defer changes.Stop()
		for number := 0; ; number++ {
			select {
			case <-ctx.Done():
				return
			case <-changes.C:
			}
			patch := fmt.Sprintf(`{"metadata":{"labels":{"change":"%d"}}}`, number)
			_, err := api.Patch(ctx, "pod-0", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			if err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
		}
	}()
}

// buildBodies makes one program of all bodies. Its source is not in the source tree: it is laid
// over it.
func buildBodies(t *testing.T, module string, bodies []string) string {
	t.Helper()
	var functions, list, imports strings.Builder
	for number, body := range bodies {
		fmt.Fprintf(&functions, "func body%d(ctx context.Context, client *kubefan.Client, config *rest.Config, "+
			"clientset kubernetes.Interface) error {\n%s%s\treturn nil\n}\n\n", number, body, usesOf(t, body))
		fmt.Fprintf(&list, "body%d, ", number)
	}
	for _, name := range slices.Sorted(maps.Keys(imported)) {
		if regexp.MustCompile(`\b` + name + `\.`).MatchString(functions.String()) {
			fmt.Fprintf(&imports, "\t%s %q\n", name, imported[name])
		}
	}
	source := map[string]string{
		"main.go": bodiesMain,
		"bodies.go": "package main\n\nimport (\n\t\"context\"\n\n\t\"k8s.io/client-go/kubernetes\"\n\t\"k8s.io/client-go/rest\"\n" +
			"\tkubefan \"kubefan.dev/clients/go\"\n" + imports.String() + ")\n\nvar bodies = []body{" + list.String() + "}\n\n" +
			functions.String(),
	}
	directory, over := t.TempDir(), map[string]string{}
	for name, text := range source {
		path := filepath.Join(directory, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		over[filepath.Join(module, "internal", "pages", name)] = path
	}
	overlay, err := json.Marshal(map[string]any{"Replace": over})
	if err != nil {
		t.Fatal(err)
	}
	overlayFile, built := filepath.Join(directory, "overlay.json"), filepath.Join(directory, "bodies")
	if err := os.WriteFile(overlayFile, overlay, 0o600); err != nil {
		t.Fatal(err)
	}
	command := exec.Command("go", "build", "-overlay", overlayFile, "-o", built, "./internal/pages")
	command.Dir = module
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("the bodies of the pages: %v\n%s\n%s", err, out, source["bodies.go"])
	}
	return built
}

// usesOf are lines that use the variables of a body, which may show no use of them.
func usesOf(t *testing.T, body string) string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "", "package p\nfunc f() {\n"+body+"}\n", 0)
	if err != nil {
		t.Fatal(err)
	}
	var uses strings.Builder
	for _, statement := range file.Decls[0].(*ast.FuncDecl).Body.List {
		if assigned, ok := statement.(*ast.AssignStmt); ok && assigned.Tok == token.DEFINE {
			for _, left := range assigned.Lhs {
				if name := left.(*ast.Ident).Name; name != "_" {
					fmt.Fprintf(&uses, "\t_ = %s\n", name)
				}
			}
		}
	}
	return uses.String()
}

// prints runs a program until it has printed all of these, and ends it.
func prints(t *testing.T, what string, expected []string, program string, args ...string) {
	t.Helper()
	ctx, end := context.WithTimeout(t.Context(), printedAtMost)
	running := exec.CommandContext(ctx, program, args...)
	reading, writing, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	running.Stdout, running.Stderr = writing, writing
	if err := running.Start(); err != nil {
		t.Fatal(err)
	}
	_ = writing.Close()
	defer func() { end(); _ = running.Wait(); _ = reading.Close() }()
	var text bytes.Buffer
	for piece := make([]byte, 64<<10); len(expected) > 0; {
		if regexp.MustCompile(expected[0]).Match(text.Bytes()) {
			expected = expected[1:]
			continue
		}
		read, err := reading.Read(piece)
		text.Write(piece[:read])
		if err != nil {
			t.Errorf("%s does not print %q, but\n%s", what, expected[0], text.Bytes())
			return
		}
	}
}
