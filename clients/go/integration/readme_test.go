package integration

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"kubefan.dev/clients/go/internal/cluster"
)

// The commands and the first program of the README, as printed, in an empty project. Only the paths and
// the address are those of the test.
func TestTheReadmesProgramRunsInAnEmptyProject(t *testing.T) {
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	block := func(language string) string {
		found := regexp.MustCompile("(?s)```" + language + "\n(.*?)```").FindSubmatch(text)
		if found == nil {
			t.Fatal("no block of ", language)
		}
		return string(found[1])
	}
	program := block("go")
	if lines := strings.Count(strings.TrimSpace(program[strings.Index(program, "func main"):]), "\n"); lines >= 20 {
		t.Error(lines, "lines in the first program")
	}
	control := cluster.Start(t)
	create(t, control.Client, 0, 2)
	fan := control.StartKubefan(t, "", "--resource", "pods")

	module, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	project := t.TempDir()
	shell := func(script string) *exec.Cmd {
		command := exec.Command("sh", "-euc", script)
		command.Dir = project
		command.Env = append(os.Environ(), "GOFLAGS=-mod=mod")
		return command
	}
	install := strings.ReplaceAll(block("sh"), "/path/to/kubefan/clients/go", module)
	if out, err := shell(install).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	program = strings.ReplaceAll(program, "127.0.0.1:7443", fan.Address)
	if err := os.WriteFile(filepath.Join(project, "main.go"), []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := shell("go build -o first .").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if names, err := os.ReadFile(filepath.Join(project, "go.mod")); err != nil || strings.Contains(string(names), "k8s.io") {
		t.Errorf("a program without informers gets them: %s %v", names, err)
	}
	running := exec.Command(filepath.Join(project, "first"))
	output, err := running.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := running.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = running.Process.Kill(); _ = running.Wait() })
	var seen []string
	for lines := bufio.NewScanner(output); len(seen) < 2 && lines.Scan(); {
		if fields := strings.Fields(lines.Text()); strings.Contains(lines.Text(), "ADDED") {
			seen = append(seen, fields[1])
		}
	}
	if strings.Join(seen, " ") != "pod-0 pod-1" {
		t.Fatal(seen)
	}
}
