package bench

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/measure"
	"github.com/gopinned/pinned/internal/testgpu"
)

// All experiments run with small copies on the device that there is, which is the
// machine's if a real one was asked for.
func TestAllOnTheDeviceThereIs(t *testing.T) {
	dev := testgpu.Device(t)
	for _, e := range All() {
		t.Run(e.Name, func(t *testing.T) {
			if e.Name == memoryName { // starts processes
				emulated(t)
			}
			b, err := measure.Run(t.Context(), e, measure.Env{
				Devices: []*cudart.Device{dev},
				Options: measure.Options{Quick: true, Sizes: []int{1 << 20}, Duration: time.Millisecond},
			}, nil)
			require.NoError(t, err)
			assert.True(t, b.Complete)
			assert.Empty(t, b.Errors)
			assert.NotEmpty(t, b.Series)
			assert.NotEmpty(t, b.Answers)
			for _, s := range b.Series {
				assert.Empty(t, s.Mismatch, "%s %v", s.Name, s.Labels)
			}
		})
	}
}
