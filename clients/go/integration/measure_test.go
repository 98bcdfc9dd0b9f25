package integration

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubefan.dev/clients/go/internal/cluster"
)

type cost struct {
	CPUMillis int64 `json:"cpu_ms"`
	HeapKiB   int64 `json:"heap_kib"`
	RSSKiB    int64 `json:"rss_kib"`
}

// Prints what a client process costs, over kubefan and straight: with -v, and 10,000 pods with
// KUBEFAN_TEST_SCALE=full. Each mode is a process of its own, all on the same updates. The test checks
// memory only: at a small scale CPU is mostly that of the start.
func TestAProcessOverKubefanHoldsNoMoreThanOneStraight(t *testing.T) {
	control := cluster.Start(t)
	pods, updates := size()
	create(t, control.Client, 0, pods)
	fan := control.StartKubefan(t, "", "--resource", "pods")
	program := filepath.Join(t.TempDir(), "measure")
	if out, err := exec.Command("go", "build", "-o", program, "kubefan.dev/clients/go/internal/measure").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	type running struct {
		mode    string
		input   io.WriteCloser
		output  *bufio.Reader
		command *exec.Cmd
	}
	read := func(it running, what string) (made cost) {
		line, err := it.output.ReadString('\n')
		text, found := strings.CutPrefix(line, what+" ")
		if err != nil || !found || json.Unmarshal([]byte(text), &made) != nil {
			t.Fatalf("%s: %q %v", it.mode, line, err)
		}
		return made
	}
	var processes []running
	start := map[string]cost{}
	for _, mode := range []string{"straight-json", "straight-protobuf", "kubefan-json", "kubefan-zstd", "kubefan-deltas", "kubefan-fields"} {
		command := exec.Command(program, mode, fan.Address, control.Kubeconfig)
		input, err := command.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		output, err := command.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := command.Start(); err != nil {
			t.Fatal(err)
		}
		it := running{mode: mode, input: input, output: bufio.NewReader(output), command: command}
		t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
		start[mode] = read(it, "synced")
		processes = append(processes, it)
	}
	change(t, control.Client, pods, updates)
	last, err := control.Client.CoreV1().Pods("default").Create(t.Context(), pod(pods), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	end := map[string]cost{}
	for _, it := range processes {
		if _, err := fmt.Fprintln(it.input, last.ResourceVersion); err != nil {
			t.Fatal(err)
		}
		end[it.mode] = read(it, "done")
		t.Logf("%-18s start: CPU %5d ms, heap %6d KiB, RSS %6d KiB; after %d updates: CPU %5d ms, heap %6d KiB, RSS %6d KiB",
			it.mode, start[it.mode].CPUMillis, start[it.mode].HeapKiB, start[it.mode].RSSKiB, updates,
			end[it.mode].CPUMillis, end[it.mode].HeapKiB, end[it.mode].RSSKiB)
	}
	// A tenth more: the two runtimes differ in what they pool.
	if got, want := end["kubefan-json"].HeapKiB, end["straight-json"].HeapKiB; got > want+want/10 {
		t.Errorf("heap %d KiB over kubefan, %d straight", got, want)
	}
}
