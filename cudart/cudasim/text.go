package cudasim

import (
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// cStrings are the strings that were returned to C. They live outside Go's heap as
// long as the process, like those of the real library.
var cStrings struct {
	mu     sync.Mutex
	at     map[string]uintptr
	buffer []byte
}

// textBytes is the size of a block for strings: all names and texts need a third of it.
const textBytes = 64 << 10

// cString returns the address of a copy that ends with a NUL, 0 if there is no
// memory for it.
func cString(s string) uintptr {
	cStrings.mu.Lock()
	defer cStrings.mu.Unlock()
	if p, ok := cStrings.at[s]; ok {
		return p
	}
	if len(cStrings.buffer) <= len(s) {
		buffer, err := mapMemory(textBytes)
		if err != nil {
			return 0
		}
		cStrings.buffer = buffer
	}
	if cStrings.at == nil {
		cStrings.at = make(map[string]uintptr)
	}
	copy(cStrings.buffer, s) // the byte after it is 0
	p := address(&cStrings.buffer[0])
	cStrings.buffer = cStrings.buffer[len(s)+1:]
	cStrings.at[s] = p
	return p
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
