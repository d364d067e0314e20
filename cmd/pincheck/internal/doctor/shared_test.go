package doctor

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/hostmem/shm"
)

// Memory that processes share is among what takes a host's memory, with its age and who has it.
func TestSharedMemoryIsNamed(t *testing.T) {
	t.Parallel()
	host := &hostinfo.Host{}
	require.NoError(t, json.Unmarshal([]byte(`{"memory":{"total_bytes":68719476736,"available_bytes":536870912}}`), host))
	f := &Facts{Host: host, Shared: []SharedMemory{
		{Path: "/dev/shm/model", Size: 40 << 30, Age: 7200, UID: 1000, Kept: true, Users: []int{12, 13}},
		{Path: "/dev/shm/old", Size: 8 << 30, Age: 60, Kept: true},
	}}
	texts := []string{
		"/dev/shm/model is shared memory of 40 GiB, 2 h 0 min old, of user 1000: 2 processes have it open, such as process 12, and it stays until it is removed",
		"/dev/shm/old is shared memory of 8 GiB, 1 min 0 s old, of user 0: no process is seen to have it open, and it stays until it is removed",
	}
	found := littleHeadroom(f)
	require.Len(t, found, 1)
	assert.Equal(t, texts, found[0].Evidence[1:])
	found = pinnedByOthers(f)
	require.Len(t, found, 1)
	assert.Contains(t, found[0].Summary, "40 GiB of 64 GiB")
	assert.Equal(t, texts, found[0].Evidence[:2])
	f.Shared[0].Users = nil
	assert.Empty(t, pinnedByOthers(f), "nobody is seen to have it")
}

func TestSharedMemoryIn(t *testing.T) {
	t.Parallel()
	assert.Empty(t, SharedMemoryIn(t.TempDir(), time.Now()))
	assert.Empty(t, SharedMemoryIn("/none", time.Now()))
	dir, err := os.MkdirTemp(shm.DefaultDir, "pinned-test-")
	if err != nil {
		t.Skip("no memory can be shared here: ", err)
	}
	defer func() { assert.NoError(t, os.Remove(dir)) }()
	small, err := shm.Create(t.Context(), "small", 1, shm.Options{Dir: dir})
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	large, err := shm.Create(t.Context(), "large", 100_000, shm.Options{Dir: dir})
	require.NoError(t, err)
	require.NoError(t, large.Begin())
	require.NoError(t, large.Complete("model"))
	found := SharedMemoryIn(dir, time.Now().Add(time.Hour))
	require.Len(t, found, 2)
	assert.GreaterOrEqual(t, found[0].Age, 3600.0)
	found[0].Age = 0
	assert.Equal(t, SharedMemory{Path: filepath.Join(dir, "large"), Size: 100_000, UID: os.Geteuid(), Complete: true, Users: []int{os.Getpid()}}, found[0])
	assert.False(t, found[1].Complete)
	require.NoError(t, errors.Join(small.Close(), large.Close()))
}
