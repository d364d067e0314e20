//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/linux"
)

// A signalAction is the kernel's struct sigaction.
type signalAction struct {
	handler, flags, restorer uintptr
	mask                     uint64
}

// handlersWithoutStack names the signals whose handlers run on the stack that they interrupt (no
// SA_ONSTACK). All of Go's handlers have a stack of their own: the stack of a goroutine is too small.
func handlersWithoutStack() (notes []string) {
	const lastSignal, ignored, onStack = 64, 1, 0x08000000
	for sig := 1; sig <= lastSignal; sig++ {
		if sig == 32 || sig == 33 { // of the C library, for its threads
			continue
		}
		var a signalAction
		if _, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), 0, uintptr(unsafe.Pointer(&a)), unsafe.Sizeof(a.mask), 0, 0); errno != 0 {
			continue
		}
		if a.handler <= ignored || a.flags&onStack != 0 {
			continue
		}
		notes = append(notes, fmt.Sprintf("signal %d (%v) has a handler without SA_ONSTACK, in %s: the Go runtime ends the process when that signal comes (that library must set SA_ONSTACK, or install no handler)",
			sig, syscall.Signal(sig), fileAt(a.handler)))
	}
	return notes
}

// fileAt returns the file that is mapped at an address of code, or the address.
func fileAt(address uintptr) string {
	maps, err := linux.OpenMaps(os.DirFS("/"))
	if err == nil {
		defer maps.Close()
		if m, ok, err := maps.Find(address); err == nil && ok && m.Start <= address && m.Name != "" {
			return m.Name
		}
	}
	return fmt.Sprintf("the code at %#x", address)
}
