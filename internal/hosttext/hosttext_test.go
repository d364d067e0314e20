package hosttext

import (
	"io/fs"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
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
	assert.Equal(t, linux.Owner{UID: 0, GID: 44}, closed["dev/nvidia1"].Sys)
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
