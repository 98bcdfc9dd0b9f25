// Package contract records how client-go's tools/cache runs the scripts of the contract test.
//
// Every script runs in a bubble of testing/synctest. There, time passes only when every goroutine
// waits, so a step has had its whole effect when synctest.Wait returns, and a recording is the same
// on each run.
package contract

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
)

type script struct {
	Name  string   `json:"name"`
	Piece string   `json:"piece"`
	Steps []string `json:"steps"`
}

// A piece executes the steps of one script. It returns the lines that the step itself answers.
type piece interface {
	step(command string, arguments []string) []string
	// close ends every goroutine.
	close()
}

var pieces = map[string]func(*log) piece{
	"key":        func(*log) piece { return keys{} },
	"store":      newStorePiece,
	"undelta":    newUndeltaPiece,
	"expiration": newExpirationPiece,
	"delta-fifo": newDeltaPiece,
	"real-fifo":  newRealPiece,
	"reflector":  newReflectorPiece,
	"informer":   newInformerPiece,
	"factory":    newFactoryPiece,
}

// A log collects the lines of one step. Each channel (the requests, each handler) has its own
// order.
type log struct {
	mutex sync.Mutex
	lines map[string][]string
}

func (l *log) add(channel, format string, arguments ...any) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.lines[channel] = append(l.lines[channel], fmt.Sprintf(format, arguments...))
}

// take returns the lines since the last call. Calls whose order client-go leaves to the iteration
// over a map are sorted. Not so at an event of a watch and at the end of a handler's pause: there
// the order counts.
func (l *log) take(keepOrder bool) []string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	channels := make([]string, 0, len(l.lines))
	for channel := range l.lines {
		channels = append(channels, channel)
	}
	slices.Sort(channels)
	lines := []string{}
	for _, channel := range channels {
		own := l.lines[channel]
		if !keepOrder {
			sortRuns(own)
		}
		for _, line := range own {
			lines = append(lines, channel+": "+line)
		}
	}
	l.lines = map[string][]string{}
	return lines
}

// sortRuns sorts consecutive deletions, and consecutive additions and updates.
func sortRuns(lines []string) {
	verb := func(line string) string { return strings.Replace(strings.Fields(line)[0], "add", "update", 1) }
	for start := 0; start < len(lines); {
		end := start + 1
		for end < len(lines) && verb(lines[end]) == verb(lines[start]) {
			end++
		}
		if kind := verb(lines[start]); kind == "update" || kind == "delete" {
			slices.Sort(lines[start:end])
		}
		start = end
	}
}

func run(script script) (recorded [][]string) {
	lines := &log{lines: map[string][]string{}}
	piece := pieces[script.Piece](lines)
	for _, step := range script.Steps {
		words := strings.Fields(step)
		var answer []string
		if words[0] == "advance" {
			duration, err := time.ParseDuration(words[1])
			must(err)
			time.Sleep(duration)
		} else {
			answer = piece.step(words[0], words[1:])
		}
		synctest.Wait()
		keepOrder := words[0] == "event" || words[0] == "unblock"
		recorded = append(recorded, append(append([]string{step}, lines.take(keepOrder)...), answer...))
	}
	piece.close()
	synctest.Wait()
	return recorded
}

// TestRecord runs every script of ../scripts. It writes the recording to the file that the
// environment variable KUBEFAN_CONTRACT_OUTPUT names.
func TestRecord(t *testing.T) {
	klog.SetOutput(new(discard))
	klog.LogToStderr(false)
	runtime.ErrorHandlers = nil
	runtime.PanicHandlers = []func(context.Context, any){}
	runtime.ReallyCrash = false
	files, err := filepath.Glob("../scripts/*.json")
	must(err)
	recorded := map[string][][]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(err)
		var scripts []script
		must(json.Unmarshal(text, &scripts))
		for _, script := range scripts {
			if len(script.Steps) == 0 {
				continue
			}
			t.Run(script.Name, func(t *testing.T) {
				synctest.Test(t, func(*testing.T) { recorded[script.Name] = run(script) })
			})
		}
	}
	output := os.Getenv("KUBEFAN_CONTRACT_OUTPUT")
	if output == "" {
		t.Log("KUBEFAN_CONTRACT_OUTPUT is not set: nothing is written")
		return
	}
	text, err := json.MarshalIndent(recorded, "", " ")
	must(err)
	must(os.WriteFile(output, append(text, '\n'), 0o644))
}

type discard struct{}

func (*discard) Write(bytes []byte) (int, error) { return len(bytes), nil }

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func unknown(command string) []string {
	panic("unknown step " + command)
}
