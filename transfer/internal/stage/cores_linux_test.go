package stage

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/linux"
)

func TestAllowedCPUsAreOfTheNode(t *testing.T) {
	t.Parallel()
	var allowed unix.CPUSet
	for _, cpu := range []int{0, 1, 2, 3, 16, 17} {
		allowed.Set(cpu)
	}
	for text, want := range map[string]int{"0-1": 2, "0-7,16-23": 6, "3": 1, "4-15": 0, "": 0, "2,17": 2} {
		list, err := linux.ParseCPUList(text)
		require.NoError(t, err)
		set := allowedCPUs(list, allowed)
		if want == 0 {
			assert.Nil(t, set, "%q", text)
			continue
		}
		if assert.NotNil(t, set, "%q", text) {
			assert.Equal(t, want, set.Count(), "%q", text)
		}
	}
}

// Cores that were chosen are left again.
func TestAffinityIsRestored(t *testing.T) {
	t.Parallel()
	var before, during, after unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &before))
	first := -1
	for cpu := range 1024 {
		if before.IsSet(cpu) {
			first = cpu
			break
		}
	}
	var one unix.CPUSet
	one.Set(first)
	done := make(chan struct{})
	go func() {
		defer close(done)
		restore := cores{set: &one}.bind()
		assert.NoError(t, unix.SchedGetaffinity(0, &during))
		restore()
		assert.NoError(t, unix.SchedGetaffinity(0, &after))
	}()
	<-done
	assert.Equal(t, 1, during.Count())
	assert.Equal(t, before, after)
}
