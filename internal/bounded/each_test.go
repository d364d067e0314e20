package bounded

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
)

type device struct{ name string }

// Each object has its own value as long as it exists, and none is kept for longer.
func TestEachObjectHasItsValue(t *testing.T) {
	t.Parallel()
	var groups Each[device, Group]
	a, b := &device{"a"}, &device{"b"}
	assert.Same(t, groups.Of(a), groups.Of(a))
	assert.NotSame(t, groups.Of(a), groups.Of(b))
	runtime.KeepAlive(a)
	runtime.KeepAlive(b)
	for remaining := 1; remaining > 0; {
		runtime.GC()
		remaining = 0
		groups.values.Range(func(any, any) bool { remaining++; return true })
	}
}
