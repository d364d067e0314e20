package bench

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// The doctor finds what it asks for in what is measured.
func TestTrialsAreWhatTheDoctorAsksFor(t *testing.T) {
	t.Parallel()
	_, env := simulated(t, 1)
	env.Duration = 0
	b := run(t, Trials(true), env)
	assert.Empty(t, b.Errors)
	require.NotNil(t, b.Find(doctor.TrialLatency))
	for _, direction := range bothDirections {
		s := b.Find(doctor.TrialBandwidth, result.Label{Key: result.Memory, Value: doctor.TrialPageable}, result.Label{Key: result.Direction, Value: direction})
		require.NotNil(t, s, direction)
		assert.True(t, s.Verified)
	}
	for _, method := range []string{doctor.TrialCUDA, doctor.TrialOurs} {
		s := b.Find(doctor.TrialPinRate, result.Label{Key: result.Method, Value: method})
		require.NotNil(t, s, method)
		assert.Positive(t, s.Median)
	}
	assert.Nil(t, run(t, Trials(false), env).Find(doctor.TrialPinRate))
}
