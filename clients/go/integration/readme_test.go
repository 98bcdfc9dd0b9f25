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
	block := func(language string, number int) string {
		found := regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllSubmatch(text, -1)
		if len(found) <= number {
			t.Fatal("no block of ", language)
		}
		return string(found[number][1])
	}
	program := block("go", 0)
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
	shell := func(script string) {
		command := exec.Command("sh", "-euc", script)
		command.Dir = project
		if out, err := command.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
	}
	shell(strings.ReplaceAll(block("sh", 0), "/path/to/kubefan/clients/go", module))
	program = strings.ReplaceAll(program, "127.0.0.1:7443", fan.Address)
	if err := os.WriteFile(filepath.Join(project, "main.go"), []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	// Built, to be ended by its process ID.
	shell(strings.ReplaceAll(block("sh", 1), "go run .", "go build -o first ."))
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
