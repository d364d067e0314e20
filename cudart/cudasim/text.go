package cudasim

import (
	"sync"

	"github.com/gopinned/pinned/cudart"
)

// cStrings are the texts that C got pointers to: like the real library's they
// live as long as the process.
var cStrings sync.Map // string -> *[]byte

func cString(s string) uintptr {
	v, ok := cStrings.Load(s)
	if !ok {
		b := append([]byte(s), 0)
		v, _ = cStrings.LoadOrStore(s, &b)
	}
	return address(&(*v.(*[]byte))[0])
}

func errorName(c cudart.Code) uintptr { return cString(c.Name()) }
func errorText(c cudart.Code) uintptr { return cString(c.Text()) }

func (c *call) getLastError() cudart.Code {
	last := c.peekAtLastError()
	c.thread.last = cudart.Success
	return last
}

// peekAtLastError fails itself while there is no usable driver.
func (c *call) peekAtLastError() cudart.Code {
	if c.driverTooOld() {
		return cudart.ErrInsufficientDriver
	}
	return c.thread.last
}
