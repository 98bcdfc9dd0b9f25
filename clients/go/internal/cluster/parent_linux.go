package cluster

import "syscall"

// endsWithParent lets a program end with the test, however that ends.
func endsWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
