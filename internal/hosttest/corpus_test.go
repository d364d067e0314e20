package hosttest

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A host adds to its base, and takes away from it.
func TestLoadCase(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(dir, name+".txtar")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		return file
	}
	base := write("base", "-- environ --\nA=1\nB=2\n-- facts.json --\n{\"devices\":[{\"name\":\"x\",\"health\":{\"mig\":true}},{\"name\":\"y\"}],\"n\":1}\n-- proc/x --\none\n-- dev/a/b --\n-- dev/ab --\n")
	c, err := LoadCase(base)
	require.NoError(t, err)
	assert.False(t, c.Graded)
	assert.Len(t, c.Host, 3)

	own := write("own", "A host.\n-- base --\nbase\n-- absent --\ndev/a\n-- environ --\nA=3\nB\n-- facts.json --\n{\"devices\":[{},{\"name\":null,\"free\":7},{\"name\":\"z\"}],\"n\":null}\n-- proc/x --\ntwo\n-- expect --\nsome_id\nother_id\n-- thread.json --\n{}\n")
	c, err = LoadCase(own)
	require.NoError(t, err)
	assert.Equal(t, []string{"A=3"}, c.Environ)
	assert.JSONEq(t, `{"devices":[{"name":"x","health":{"mig":true}},{"free":7},{"name":"z"}]}`, string(c.Facts))
	assert.Equal(t, []string{"some_id", "other_id"}, c.Expect)
	assert.True(t, c.Graded)
	assert.JSONEq(t, `{}`, string(c.Thread))
	assert.Equal(t, "two\n", string(c.Host["proc/x"].Data))
	assert.NotContains(t, c.Host, "dev/a/b")
	assert.Contains(t, c.Host, "dev/ab")
	assert.Len(t, c.Host, 2, "what is about the host is none of its files")

	for text, says := range map[string]string{
		"-- base --\nnone\n":                       "base: ",
		"-- base --\nloop\n":                       "want one name, and few bases",
		"-- base --\nbase\n-- absent --\nproc/y\n": "absent: the base has no proc/y",
		"-- base --\nbase\nown\n":                  "want one name",
		"-- facts.json --\n{\n":                    "facts.json: ",
	} {
		_, err := LoadCase(write("loop", text))
		assert.ErrorContains(t, err, says, "%q", text)
	}
}

func TestLoadOfNoFile(t *testing.T) {
	t.Parallel()
	_, err := Load("no/such/file")
	assert.ErrorIs(t, err, fs.ErrNotExist)
}
