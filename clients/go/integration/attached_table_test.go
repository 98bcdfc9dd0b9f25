package integration

import (
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"kubefan.dev/clients/go/internal/cluster"
)

// table has a row for each fault.
type table struct{ rows []string }

// add adds what the program and the informers without kubefan have seen since the fault.
func (f *table) add(s *scene, fault string) {
	late, lost, lostDirectly, repeated, repeatedDirectly := time.Duration(0), 0, 0, 0, 0
	for _, each := range written {
		mine, theirs := s.attached.histories[each], s.straight.histories[each]
		late = max(late, mine.latest(theirs, s.struckAt))
		lost, lostDirectly = lost+mine.lacks(theirs), lostDirectly+theirs.lacks(mine)
		repeated, repeatedDirectly = repeated+mine.repetitions(), repeatedDirectly+theirs.repetitions()
	}
	gap, _ := s.load.gap(s.struckAt)
	reads := 0
	for _, count := range s.traffic.counts(s.struckAt) {
		reads += count
	}
	f.rows = append(f.rows, fmt.Sprintf("| %s | %.1f s | %.1f s | %d / %d | %d / %d | %d / %d | %d | %d |", fault, late.Seconds(), gap.Seconds(),
		s.load.allFailed.Load(), s.directly.allFailed.Load(), lost, lostDirectly, repeated, repeatedDirectly,
		reads, requestsOf(s.T, s.control)-s.requests))
}

func (f *table) print(t *testing.T) {
	t.Log("program / direct client:\n| fault | events late by | longest time without a read | failed writes | events lost | " +
		"events repeated | reads of the program at the apiserver | reads that the apiserver counts |\n" +
		"|---|---|---|---|---|---|---|---|\n" + strings.Join(f.rows, "\n"))
}

// lacks returns the number of events of another history that this one does not have.
func (h *history) lacks(other *history) (count int) {
	for _, key := range other.keys() {
		h.mu.Lock()
		if _, found := h.at[key]; !found {
			count++
		}
		h.mu.Unlock()
	}
	return count
}

func (h *history) keys() (keys []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for key := range h.at {
		keys = append(keys, key)
	}
	return keys
}

func (h *history) repetitions() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.repeated
}

// requestsOf returns the number of reads that the apiserver has counted since its start, those of
// all its clients. It counts a watch when that ends.
func requestsOf(t *testing.T, control *cluster.Cluster) (count int) {
	t.Helper()
	text, err := control.Client.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		isRead := strings.Contains(line, `verb="GET"`) || strings.Contains(line, `verb="LIST"`) || strings.Contains(line, `verb="WATCH"`)
		if !strings.HasPrefix(line, "apiserver_request_total{") || !isRead {
			continue
		}
		value, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndex(line, " "):]), 64)
		if err != nil {
			t.Fatal(line, err)
		}
		count += int(value)
	}
	return count
}

// partition is a proxy that can stop to forward without closing a connection.
type partition struct {
	address string
	to      string
	// begun is closed when it stops, and ended with the test.
	begun, ended chan struct{}
}

func startPartition(t *testing.T, to string) *partition {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	made := &partition{address: listener.Addr().String(), to: to, begun: make(chan struct{}), ended: make(chan struct{})}
	t.Cleanup(func() {
		close(made.ended)
		_ = listener.Close()
	})
	go func() {
		for {
			accepted, err := listener.Accept()
			if err != nil {
				return
			}
			go made.connect(accepted)
		}
	}()
	return made
}

func (p *partition) begin() { close(p.begun) }

// connect joins a connection with one to kubefan.
func (p *partition) connect(accepted net.Conn) {
	defer accepted.Close()
	reached, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer reached.Close()
	done := make(chan struct{}, 2)
	for _, way := range [][2]net.Conn{{accepted, reached}, {reached, accepted}} {
		go func() {
			_, _ = io.Copy(way[1], forwarded{way[0], p})
			done <- struct{}{}
		}()
	}
	<-done
}

// forwarded is what a partition still forwards.
type forwarded struct {
	net.Conn
	partition *partition
}

func (f forwarded) Read(into []byte) (int, error) {
	count, err := f.Conn.Read(into)
	select {
	case <-f.partition.begun:
		<-f.partition.ended
		return 0, io.EOF
	default:
		return count, err
	}
}
