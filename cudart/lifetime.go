package cudart

import (
	"runtime"
	"sync/atomic"
)

// A lifetime keeps a handle from being destroyed while another goroutine is
// inside a call that uses it. It costs two atomic additions a call.
type lifetime struct {
	state atomic.Int64 // calls under way, plus closing once close was called
}

const closing = 1 << 40

// enter starts a use of the handle; false means that it is closed.
func (l *lifetime) enter() bool {
	if l.state.Add(1) >= closing {
		l.state.Add(-1)
		return false
	}
	return true
}

func (l *lifetime) leave() { l.state.Add(-1) }

// close ends the lifetime and waits for the calls under way, which are short:
// nothing waits for the GPU inside one. It is false when it was closed before.
func (l *lifetime) close() bool {
	for {
		s := l.state.Load()
		if s >= closing {
			return false
		}
		if l.state.CompareAndSwap(s, s+closing) {
			break
		}
	}
	for l.state.Load() != closing {
		runtime.Gosched()
	}
	return true
}

// reopen undoes close, for a handle whose destruction failed.
func (l *lifetime) reopen() { l.state.Add(-closing) }
