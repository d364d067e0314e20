package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gopinned/pinned/hostmem/shm"
	"github.com/gopinned/pinned/internal/units"
)

// SharedMemory is memory of package hostmem/shm, which processes share and which may outlive them.
type SharedMemory struct {
	Path     string  `json:"path"`
	Size     int     `json:"size_bytes"`
	Age      float64 `json:"age_s"` // since it was made
	UID      int     `json:"uid"`   // of the user that it belongs to
	Kept     bool    `json:"kept"`  // it stays when no process has it open
	Complete bool    `json:"complete"`
	Users    []int   `json:"pids,omitempty"` // processes that have it open and that this one can see
}

// maxShared limits how many are listed.
const maxShared = 64

// SharedMemoryIn returns the shared memory in a directory that this user may read, the largest first.
func SharedMemoryIn(dir string, now time.Time) (all []SharedMemory) {
	found, _ := shm.List(dir) // no directory, no memory
	for _, m := range found {
		all = append(all, SharedMemory{
			Path: m.Path, Size: m.Len, Age: now.Sub(m.Created).Seconds(), UID: m.UID, Kept: m.Keep,
			Complete: m.Content.Complete, Users: m.Users,
		})
	}
	slices.SortStableFunc(all, func(a, b SharedMemory) int { return cmp.Compare(b.Size, a.Size) })
	return all[:min(len(all), maxShared)]
}

// sharedMemory returns how much of it there is, how much of that processes have open, and describes the largest pieces.
func (f *Facts) sharedMemory() (bytes, used int, texts []string) {
	for _, m := range f.Shared {
		bytes += max(0, m.Size)
		if len(m.Users) > 0 {
			used += max(0, m.Size)
		}
		if len(texts) < maxPinners {
			texts = append(texts, m.String())
		}
	}
	return bytes, used, texts
}

// String describes it in a sentence.
func (m SharedMemory) String() string {
	state := "no process is seen to have it open"
	if n := len(m.Users); n > 0 {
		state = fmt.Sprintf("%s open, such as process %d", units.Things(n, "process has it", "processes have it"), m.Users[0])
	}
	if m.Kept {
		state += ", and it stays until it is removed"
	}
	return fmt.Sprintf("%s is shared memory of %s, %s old, of user %d: %s", m.Path, units.Bytes(m.Size), units.Seconds(m.Age), m.UID, state)
}
