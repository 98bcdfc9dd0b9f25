//go:build unix

package cluster

import (
	"syscall"
	"testing"
)

// Hang stops kubefan by SIGSTOP: its sockets stay open, and nothing answers.
func (k *Kubefan) Hang(t testing.TB) {
	t.Helper()
	if err := k.process.command.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
}
