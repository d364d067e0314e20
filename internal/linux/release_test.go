package linux_test

import (
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestParseRelease(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]linux.Release{
		"6.8.0-45-generic\n":                 {Major: 6, Minor: 8},
		"6.14":                               {Major: 6, Minor: 14},
		"6.1-rc3":                            {Major: 6, Minor: 1},
		"4.18.0-305.el8.x86_64":              {Major: 4, Minor: 18},
		"5.15.153.1-microsoft-standard-WSL2": {Major: 5, Minor: 15},
	} {
		got, err := linux.ParseRelease(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "6", "6.", ".1", "six.eight", "6.x", "-6.1", "6.99999999999", "unknown"} {
		_, err := linux.ParseRelease(text)
		assert.Error(t, err, "%q", text)
	}
}

func TestReleaseAtLeast(t *testing.T) {
	t.Parallel()
	r := linux.Release{Major: 6, Minor: 11}
	for _, at := range [][2]int{{6, 11}, {6, 10}, {5, 19}, {0, 0}} {
		assert.True(t, r.AtLeast(at[0], at[1]), at)
	}
	for _, at := range [][2]int{{6, 12}, {7, 0}, {7, 12}} {
		assert.False(t, r.AtLeast(at[0], at[1]), at)
	}
	assert.False(t, linux.Release{}.AtLeast(2, 6), "an unknown release is earlier than all")
}

func TestReadReleaseOfThisHost(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("no /proc on " + runtime.GOOS)
	}
	r, err := linux.ReadRelease(os.DirFS("/"))
	require.NoError(t, err)
	assert.True(t, r.AtLeast(3, 2), "Go needs 3.2, and this is %v", r)
}

func FuzzParseRelease(f *testing.F) {
	f.Add("6.8.0-45-generic")
	f.Add("6.")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := linux.ParseRelease(text)
		if err == nil {
			require.True(t, r.Major >= 0 && r.Minor >= 0, "%v", r)
			require.True(t, r.AtLeast(r.Major, r.Minor))
		}
	})
}
