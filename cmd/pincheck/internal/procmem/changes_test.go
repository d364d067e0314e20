package procmem

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// processOf is a /proc of process 7 with these lines of maps.
func processOf(lines ...string) fstest.MapFS {
	return fstest.MapFS{
		"proc/7/status": {Data: []byte("Name:\tpython3\nState:\tS (sleeping)\n")},
		"proc/7/maps":   {Data: []byte(strings.Join(append(lines, "7f9000000000-7f9000400000 r-xp 00000000 00:01 9 /usr/lib/libcuda.so.580\n"), "\n"))},
		"proc/self":     {Mode: fs.ModeDir},
	}
}

func TestChangesCountsBlocks(t *testing.T) {
	t.Parallel()
	const (
		a        = "7f0000000000-7f0000400000 rw-s 00000000 00:01 1063 /dev/zero (deleted)"
		another  = "7f0000000000-7f0000400000 rw-s 00000000 00:01 1064 /dev/zero (deleted)"
		b        = "7f1000000000-7f1000001000 rw-s 00000000 00:01 1065 /dev/zero (deleted)"
		ours     = "7f2000000000-7f2000002000 rw-p 00000000 00:00 0 [anon:pinned]"
		upper    = "7f2000001000-7f2000002000 rw-p 00000000 00:00 0 [anon:pinned]"
		lower    = "7f2000000000-7f2000001000 rw-p 00000000 00:00 0 [anon:pinned]"
		longer   = "7f2000000000-7f2000005000 rw-p 00000000 00:00 0 [anon:pinned]"
		parts    = "7f2000001000-7f2000002000 rw-p 00000000 00:00 0 [anon:pinned]\n7f2000003000-7f2000004000 rw-p 00000000 00:00 0 [anon:pinned]"
		ordinary = "7f3000000000-7f3000005000 rw-p 00000000 00:00 0"
	)
	for name, c := range map[string]struct {
		before, now        []string
		appeared, vanished Blocks
	}{
		"nothing":                                {before: []string{a, ours, ordinary}, now: []string{a, ours}},
		"a block more":                           {before: []string{a}, now: []string{a, b}, appeared: Blocks{1, 4096}},
		"a block less":                           {before: []string{a, b}, now: []string{b}, vanished: Blocks{1, 4 << 20}},
		"another in its place":                   {before: []string{a}, now: []string{another}, appeared: Blocks{1, 4 << 20}, vanished: Blocks{1, 4 << 20}},
		"one and another":                        {before: []string{a}, now: []string{ours}, appeared: Blocks{1, 8192}, vanished: Blocks{1, 4 << 20}},
		"a mapping that is split is no change":   {before: []string{ours}, now: []string{lower, upper}},
		"a block of two mappings":                {now: []string{lower, upper}, appeared: Blocks{1, 8192}},
		"a mapping that grows":                   {before: []string{ours}, now: []string{longer}, appeared: Blocks{1, 3 * 4096}},
		"a mapping that shrinks":                 {before: []string{ours}, now: []string{upper}, vanished: Blocks{1, 4096}},
		"parts of one mapping":                   {before: []string{longer}, now: []string{parts}, vanished: Blocks{3, 3 * 4096}},
		"ordinary memory is not what is counted": {now: []string{ordinary}},
	} {
		t.Run(name, func(t *testing.T) {
			root := processOf(c.before...)
			changes := NewChanges(root, 7)
			require.NoError(t, changes.Look())
			assert.Zero(t, changes.Appeared, "what was there before")
			root["proc/7/maps"] = processOf(c.now...)["proc/7/maps"]
			for range 2 { // the second one adds nothing
				require.NoError(t, changes.Look())
				assert.Equal(t, c.appeared, changes.Appeared)
				assert.Equal(t, c.vanished, changes.Vanished)
			}
		})
	}
}

func TestChangesNeedsADriverForSharedMemory(t *testing.T) {
	t.Parallel()
	root := processOf()
	root["proc/7/maps"].Data = []byte("7f4000000000-7f4000001000 r-xp 00000000 00:01 9 /usr/lib/libc.so.6\n")
	changes := NewChanges(root, 7)
	require.NoError(t, changes.Look())
	root["proc/7/maps"].Data = []byte("7f0000000000-7f0000400000 rw-s 00000000 00:01 1063 /dev/zero (deleted)\n")
	require.NoError(t, changes.Look())
	assert.Zero(t, changes.Appeared)
}

func TestChangesOfAProcessThatCannotBeRead(t *testing.T) {
	t.Parallel()
	root := processOf()
	changes := NewChanges(root, 7)
	require.NoError(t, changes.Look())
	root["proc/7/maps"].Data = nil
	require.ErrorIs(t, changes.Look(), fs.ErrNotExist)
	delete(root, "proc/7/status")
	require.ErrorIs(t, changes.Look(), fs.ErrNotExist)
	require.ErrorContains(t, NewChanges(refusing{processOf()}, 7).Look(), "run as the user of the process")
	root = processOf("7f0 [anon:pinned]")
	require.ErrorContains(t, NewChanges(root, 7).Look(), "memory of process 7: ")
}

// refusing is a /proc whose maps may not be read.
type refusing struct{ fstest.MapFS }

func (r refusing) ReadFile(name string) ([]byte, error) {
	if strings.HasSuffix(name, "/maps") {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return r.MapFS.ReadFile(name)
}
