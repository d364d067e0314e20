package bounded

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
)

type device struct{ name string }

// Each object has its own Group as long as it exists, and none is kept for longer.
func TestGroupsOfObjects(t *testing.T) {
	t.Parallel()
	var groups Groups[device]
	a, b := &device{"a"}, &device{"b"}
	assert.Same(t, groups.Of(a), groups.Of(a))
	assert.NotSame(t, groups.Of(a), groups.Of(b))
	runtime.KeepAlive(a)
	runtime.KeepAlive(b)
	for left := 1; left > 0; {
		runtime.GC()
		left = 0
		groups.byKey.Range(func(any, any) bool { left++; return true })
	}
}
