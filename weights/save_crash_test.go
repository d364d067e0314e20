package weights

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
)

// tensorsOf returns tensors of host memory: their bytes say which model they are of.
func tensorsOf(fill byte, sizes ...int) (tensors []SavedTensor) {
	for i, n := range sizes {
		tensors = append(tensors, SavedTensor{Name: fmt.Sprint("t", i), DType: U8, Shape: []int{n}, Host: bytes.Repeat([]byte{fill + byte(i)}, n)})
	}
	return tensors
}

// contents returns the bytes of all tensors of a model.
func contents(path string) (map[string]string, error) {
	m, err := OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	all := map[string]string{}
	for t := range m.Tensors() {
		b := make([]byte, t.Size)
		if _, err := t.File.Reader().ReadAt(b, t.Offset); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		all[t.Name] = string(b)
	}
	return all, nil
}

// saveAs saves a model in the given number of files.
func saveAs(path string, tensors []SavedTensor, files int, changed func(change) error) error {
	total := 0
	for _, t := range tensors {
		total += len(t.Host)
	}
	s := &Saving{path: path, o: SaveOptions{ShardBytes: (total + files - 1) / files}, changed: inTurn(changed)}
	if err := s.begin(context.Background(), tensors); err != nil {
		return err
	}
	return s.Wait(context.Background())
}

func nothing(change) error { return nil }

// inTurn returns a function that makes one call at a time.
func inTurn(changed func(change) error) func(change) error {
	var mu sync.Mutex
	return func(c change) error {
		mu.Lock()
		defer mu.Unlock()
		return changed(c)
	}
}

// filesIn returns the files of a directory with their bytes.
func filesIn(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	files := map[string]string{}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		require.NoError(t, err)
		files[e.Name()] = string(b)
	}
	return files
}

// A saveCase is a save over a model of 0 (none) or more files.
type saveCase struct{ before, after int }

var saveCases = []saveCase{{0, 1}, {1, 1}, {1, 3}, {3, 3}, {3, 2}, {3, 1}, {0, 2}}

// run saves the model before, and then the new one.
func (c saveCase) run(t *testing.T, changed func(dir string) func(change) error) (dir string, old, now map[string]string, err error) {
	t.Helper()
	dir = t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	if c.before > 0 {
		require.NoError(t, saveAs(path, tensorsOf('a', 300, 300, 300), c.before, nothing))
		old, err = contents(dir)
		require.NoError(t, err)
	}
	tensors := tensorsOf('A', 300, 300, 300, 6)
	now = map[string]string{}
	for _, tensor := range tensors {
		now[tensor.Name] = string(tensor.Host)
	}
	return dir, old, now, saveAs(path, tensors, c.after, changed(dir))
}

// An error at each change of the file system leaves a whole model, and no file besides.
func TestASaveThatFailsLeavesAWholeModel(t *testing.T) {
	t.Parallel()
	for _, c := range saveCases {
		failed := errors.New("input/output error")
		for at := 0; ; at++ {
			n, call := 0, change{}
			dir, old, now, err := c.run(t, func(string) func(change) error {
				return func(what change) error {
					if n++; n == at+1 {
						call = what
						return failed
					}
					return nil
				}
			})
			if n <= at {
				require.NoError(t, err)
				break
			}
			require.ErrorIs(t, err, failed, "%v at %v", c, call)

			got, err := contents(dir)
			if old == nil && err != nil {
				assert.Empty(t, filesIn(t, dir), "%v at %v", c, call)
				continue
			}
			require.NoError(t, err, "%v at %v", c, call)
			assert.True(t, maps.Equal(got, old) || maps.Equal(got, now), "%v at %v: neither the old nor the new model", c, call)
			for name := range filesIn(t, dir) {
				assert.False(t, strings.HasSuffix(name, ".tmp"), "%v at %v: %s is left", c, call, name)
			}
		}
	}
}

// A disk models storage after a loss of power. Flushed bytes are there. Each change of a name since the last flush of
// the directory is there or not, independently of the others.
type disk struct {
	names   map[string]string // the inode of each name, as flushed; an inode is the temporary name that it had first
	content map[string]string // of inodes that were flushed; others are torn
	pending []change
}

const torn = "torn"

func (d *disk) apply(names map[string]string, c change) {
	switch c.call {
	case "create":
		names[c.path] = c.path
	case "link":
		names[c.path] = c.from
	case "rename":
		names[c.path] = c.from
		delete(names, c.from)
	case "remove":
		delete(names, c.path)
	}
}

// states calls f with the files of each state that may be found.
func (d *disk) states(f func(files map[string]string)) {
	for subset := range 1 << len(d.pending) {
		names := maps.Clone(d.names)
		for i, c := range d.pending {
			if subset>>i&1 != 0 {
				d.apply(names, c)
			}
		}
		files := map[string]string{}
		for name, inode := range names {
			content, flushed := d.content[inode]
			if !flushed {
				content = torn
			}
			files[filepath.Base(name)] = content
		}
		f(files)
	}
}

// Whatever of a save is on storage when power is lost, the model is the one before or the new one.
func TestPowerIsLostAtAnyMoment(t *testing.T) {
	t.Parallel()
	for _, c := range saveCases {
		var d disk
		var states []map[string]string
		seen := map[string]bool{}
		_, old, now, err := c.run(t, func(dir string) func(change) error {
			d = disk{names: map[string]string{}, content: map[string]string{}}
			for name, content := range filesIn(t, dir) {
				path := filepath.Join(dir, name)
				d.names[path], d.content[path] = path, content
			}
			return func(what change) error {
				switch {
				case what.call == "write": // what is on storage of the bytes is known after their fsync
				case what.call != "fsync":
					d.pending = append(d.pending, what)
				case what.path == dir:
					for _, p := range d.pending {
						d.apply(d.names, p)
					}
					d.pending = nil
				default:
					b, err := os.ReadFile(what.path)
					require.NoError(t, err)
					d.content[what.path] = string(b)
				}
				d.states(func(files map[string]string) {
					key := fmt.Sprint(files)
					if !seen[key] {
						seen[key] = true
						states = append(states, files)
					}
				})
				return nil
			}
		})
		require.NoError(t, err)
		require.Greater(t, len(states), 3)
		last := 0
		for _, files := range hosttest.Sample(states) {
			dir := t.TempDir()
			for name, content := range files {
				require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
			}
			listed := slices.Sorted(maps.Keys(files))
			got, err := contents(dir)
			if len(old) == 0 && err != nil {
				continue
			}
			require.NoError(t, err, "%v: %v", c, listed)
			require.True(t, maps.Equal(got, old) || maps.Equal(got, now), "%v: %v: neither the old nor the new model", c, listed)
			if maps.Equal(got, now) {
				last++
			}
			if _, there := files["model.safetensors"]; there {
				got, err := contents(filepath.Join(dir, "model.safetensors"))
				require.NoError(t, err, "%v: %v", c, listed)
				require.True(t, maps.Equal(got, old) || maps.Equal(got, now), "%v: %v: neither the old nor the new model by its path", c, listed)
			}
		}
		assert.True(t, last > 0 || testing.Short(), "%v: no state has the new model", c)
		t.Logf("%v: %d states of the disk", c, len(states))
	}
}

// savesEnv makes the test binary a process that saves models of one byte value each, in the directory that it names,
// until it is killed.
const savesEnv = "PINNED_TEST_SAVES"

// Whenever a process is killed, the model is one of those that it saved.
func TestKilledSavesLeaveAWholeModel(t *testing.T) {
	if dir := os.Getenv(savesEnv); dir != "" {
		for i := 0; ; i++ {
			err := saveAs(filepath.Join(dir, "model.safetensors"), tensorsOf(byte(i), 200_000, 200_000, 200_000), 1+i%3, nothing)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Println("saved")
		}
	}
	t.Parallel()
	kills := 8
	if os.Getenv("PINNED_SOAK") != "" {
		kills = 1000
	}
	dir := t.TempDir()
	left := 0
	for range kills {
		child := hosttest.Command(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		child.Env = append(os.Environ(), savesEnv+"="+dir)
		out, err := child.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, child.Start())
		_, err = bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err)
		time.Sleep(time.Duration(rand.IntN(20_000)) * time.Microsecond)
		require.NoError(t, child.Process.Kill())
		require.Error(t, child.Wait())

		got, err := contents(dir)
		require.NoError(t, err)
		require.Len(t, got, 3)
		for i := range 3 { // each byte is that of the model, plus the number of the tensor
			want := strings.Repeat(string([]byte{got["t0"][0] + byte(i)}), 200_000)
			require.True(t, got[fmt.Sprint("t", i)] == want, "tensor %d is not all of one model", i)
		}
		for name := range filesIn(t, dir) {
			if strings.HasSuffix(name, ".tmp") {
				left++
			}
		}
	}
	require.NoError(t, saveAs(filepath.Join(dir, "model.safetensors"), tensorsOf('a', 1), 1, nothing))
	for name := range filesIn(t, dir) {
		assert.False(t, runtime.GOOS == "linux" && strings.HasSuffix(name, ".tmp"), "%s is left", name)
	}
	t.Logf("%d kills left %d temporary files, which later saves removed", kills, left)
}
