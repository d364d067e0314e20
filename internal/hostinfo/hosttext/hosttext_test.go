package hosttext

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hostinfo"
)

func TestParse(t *testing.T) {
	t.Parallel()
	host, err := Parse("a comment\n-- proc/x --\none\n-- not a header\ntwo\n-- dev/nvidia0 (device) --\n\n-- a/link -> ../proc/x --\n-- empty --\n")
	require.NoError(t, err)
	assert.Equal(t, "one\n-- not a header\ntwo\n", string(host["proc/x"].Data))
	assert.Equal(t, fs.ModeDevice|fs.ModeCharDevice|0o666, host["dev/nvidia0"].Mode)
	b, err := fs.ReadFile(host, "a/link")
	require.NoError(t, err)
	assert.Contains(t, string(b), "one")
	assert.Empty(t, host["empty"].Data)
	closed, err := Parse("-- dev/nvidia1 (device 0660 0:44) --\n")
	require.NoError(t, err)
	assert.Equal(t, fs.ModeDevice|fs.ModeCharDevice|0o660, closed["dev/nvidia1"].Mode)
	assert.Equal(t, hostinfo.Owner{UID: 0, GID: 44}, closed["dev/nvidia1"].Sys)
	assert.Equal(t, "-- dev/nvidia1 (device 0660 0:44) --\n", Format("", closed))

	again, err := Parse(Format("a comment", host))
	require.NoError(t, err)
	assert.Equal(t, host, again)
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	for text, says := range map[string]string{
		"":                   "no entry",
		"just a comment\n":   "no entry",
		"-- /proc/x --\n":    "not a path",
		"-- ../x --\n":       "not a path",
		"-- . --\n":          "not a path",
		"-- a --\n-- a --\n": "line 2: a comes twice",
		"-- a (device 0660 99999999999999999999:0) --\n": "no owner",
		"-- a (device) --\ntext\n":                       "text below",
		"x\n-- a -> b --\n\ntext below\n":                "line 4",
	} {
		_, err := Parse(text)
		assert.ErrorContains(t, err, says, "%q", text)
	}
}

// What is read through a Recorder is recorded; what is only listed is not.
func TestRecorder(t *testing.T) {
	t.Parallel()
	rec := Record(fstest.MapFS{
		"proc/self/status": {Data: []byte("Name:\tsecret\nCpus_allowed_list:\t0-3\n")},
		"lib/libc.so.6":    {Data: []byte("\x7fELF\x00GNU C Library (X) stable release version 2.39.\n\x00more")},
		"dev/nvidia0":      {Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666},
		"dev/sda":          {Mode: fs.ModeDevice | 0o600},
		"link":             {Mode: fs.ModeSymlink, Data: []byte("dev")},
	})
	all, err := fs.ReadFile(rec, "proc/self/status")
	require.NoError(t, err)
	assert.Contains(t, string(all), "secret", "the reader gets everything")
	_, err = fs.ReadFile(rec, "lib/libc.so.6")
	require.NoError(t, err)
	_, err = fs.ReadDir(rec, "dev")
	require.NoError(t, err)
	_, err = fs.Stat(rec, "dev/nvidia0")
	require.NoError(t, err)
	_, err = fs.ReadLink(rec, "link")
	require.NoError(t, err)
	_, err = rec.Open("missing")
	require.ErrorIs(t, err, fs.ErrNotExist)

	host := rec.Host()
	assert.Len(t, host, 4)
	assert.Equal(t, "Cpus_allowed_list:\t0-3\n", string(host["proc/self/status"].Data))
	assert.Equal(t, "GNU C Library (X) stable release version 2.39.\n", string(host["lib/libc.so.6"].Data))
	assert.NotZero(t, host["dev/nvidia0"].Mode&fs.ModeDevice)
	assert.NotContains(t, host, "dev/sda")
}
