//go:build !linux

package cluster

import "syscall"

func endsWithParent() *syscall.SysProcAttr { return nil }
