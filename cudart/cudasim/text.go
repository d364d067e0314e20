package cudasim

import (
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// cStrings has the addresses of strings that were returned to C. They live outside Go's heap as
// long as the process, like those of the real library.
var cStrings sync.Map

// cString returns the address of a copy that ends with a NUL, 0 if there is no
// memory for it.
func cString(s string) uintptr {
	if p, ok := cStrings.Load(s); ok {
		return p.(uintptr)
	}
	b, err := mapMemory(len(s) + 1) // the byte after it is 0
	if err != nil {
		return 0
	}
	copy(b, s)
	p, _ := cStrings.LoadOrStore(s, address(&b[0]))
	return p.(uintptr)
}

func errorName(c cudart.Code) uintptr { return cString(c.Name()) }
func errorText(c cudart.Code) uintptr { return cString(c.Text()) }

func (c *call) getLastError() cudart.Code {
	last := c.peekAtLastError()
	c.thread.last = success
	return last
}

// peekAtLastError fails itself while there is no usable driver.
func (c *call) peekAtLastError() cudart.Code {
	if c.driverTooOld() {
		return cudart.ErrInsufficientDriver
	}
	return c.thread.last
}
