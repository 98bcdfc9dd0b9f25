// Refuses a binary that the image could not run: it has no dynamic linker and no libraries.
package main

import (
	"bytes"
	"debug/elf"
	"fmt"
)

var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

func isStatic(arch string, binary []byte) error {
	machine, known := machines[arch]
	if !known {
		return fmt.Errorf("architecture %s is not released: use amd64 or arm64", arch)
	}
	file, err := elf.NewFile(bytes.NewReader(binary))
	if err != nil {
		return fmt.Errorf("is not a Linux binary: %w", err)
	}
	if file.Machine != machine {
		return fmt.Errorf("is built for %s", file.Machine)
	}
	for _, segment := range file.Progs {
		if segment.Type == elf.PT_INTERP {
			return fmt.Errorf("is not static: it needs a dynamic linker")
		}
	}
	// A static binary that is position-independent has a dynamic section, but no libraries in it.
	if libraries, err := file.ImportedLibraries(); err == nil && len(libraries) > 0 {
		return fmt.Errorf("is not static: it needs %s", libraries[0])
	}
	return nil
}
