package transfer

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestNearCores(t *testing.T) {
	t.Parallel()
	var allowed unix.CPUSet
	for _, cpu := range []int{0, 1, 2, 3, 16, 17} {
		allowed.Set(cpu)
	}
	for list, want := range map[string]int{"0-1": 2, "0-7,16-23\n": 6, "3": 1, "4-15": 0, "": 0, "x": 0, "1-": 0, "2,17": 2, "3-2": 0} {
		set := near(list, allowed)
		if want == 0 {
			assert.Nil(t, set, "%q", list)
			continue
		}
		if assert.NotNil(t, set, "%q", list) {
			assert.Equal(t, want, set.Count(), "%q", list)
		}
	}
}

func FuzzNear(f *testing.F) {
	for _, list := range []string{"0-1", "0,2-3,8", "-", "9999999999999", "0-18446744073709551615", "0-9999999999999"} {
		f.Add(list)
	}
	var allowed unix.CPUSet
	allowed.Set(0)
	allowed.Set(63)
	f.Fuzz(func(t *testing.T, list string) {
		if set := near(list, allowed); set != nil && (set.Count() < 1 || set.Count() > 2) {
			t.Errorf("%q: %d cores", list, set.Count())
		}
	})
}

// Cores that were chosen are left again.
func TestCoresAreLeft(t *testing.T) {
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
		leave := cores{set: &one}.enter()
		assert.NoError(t, unix.SchedGetaffinity(0, &during))
		leave()
		assert.NoError(t, unix.SchedGetaffinity(0, &after))
	}()
	<-done
	assert.Equal(t, 1, during.Count())
	assert.Equal(t, before, after)
}
