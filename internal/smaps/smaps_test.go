package smaps_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/smaps"
)

const captured = `7f1000000000-7f1000400000 rw-p 00000000 00:00 0                          [anon:pinned]
Size:               4096 kB
KernelPageSize:        4 kB
Rss:                4096 kB
AnonHugePages:      4096 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:       0 kB
VmFlags: rd wr mr mw me dc ac dd hg
7f1000400000-7f1000401000 rw-p 00000000 00:00 0
Size:                  4 kB
KernelPageSize:        4 kB
Rss:                   4 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac
7f2000000000-7f2000400000 rw-p 00000000 00:0f 1234                       /anon_hugepage (deleted)
Size:               4096 kB
KernelPageSize:     2048 kB
Rss:                   0 kB
Private_Hugetlb:    4096 kB
VmFlags: rd wr mr mw me de ht
`

func TestReadSumsTheMappingsThatOverlap(t *testing.T) {
	t.Parallel()
	const a, b = 0x7f1000000000, 0x7f2000000000
	for _, tc := range []struct {
		name string
		addr uintptr
		n    int
		want smaps.Usage
	}{
		{"one", a, 4096, smaps.Usage{Start: a, End: a + 4<<20, Maps: 1, Size: 4 << 20, Rss: 4 << 20, AnonHuge: 4 << 20, PageSize: 4096,
			Flags: []string{"rd", "wr", "mr", "mw", "me", "dc", "ac", "dd", "hg"}, Name: "[anon:pinned]"}},
		{"two", a, 4<<20 + 1, smaps.Usage{Start: a, End: a + 4<<20 + 4096, Maps: 2, Size: 4<<20 + 4096, Rss: 4<<20 + 4096, AnonHuge: 4 << 20, PageSize: 4096,
			Flags: []string{"rd", "wr", "mr", "mw", "me", "dc", "ac", "dd", "hg"}, Name: "[anon:pinned]"}},
		{"hugetlb", b, 1, smaps.Usage{Start: b, End: b + 4<<20, Maps: 1, Size: 4 << 20, Hugetlb: 4 << 20, PageSize: 2 << 20,
			Flags: []string{"rd", "wr", "mr", "mw", "me", "de", "ht"}, Name: "/anon_hugepage (deleted)"}},
		{"nothing", b - 4096, 4096, smaps.Usage{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := smaps.Read(strings.NewReader(captured), tc.addr, tc.n)
			require.NoError(t, err)
			assert.Equal(t, tc.want, got)
		})
	}
}

func TestReadRefusesWhatIsNoNumber(t *testing.T) {
	t.Parallel()
	_, err := smaps.Read(strings.NewReader("1000-2000 rw-p 0 00:00 0\nRss: many kB\n"), 0x1000, 1)
	assert.ErrorContains(t, err, `"Rss: many kB"`)
}

func FuzzRead(f *testing.F) {
	f.Add(captured)
	f.Add("1000-2000 rw-p 0 00:00 0\nRss: -1 kB\n")
	f.Fuzz(func(t *testing.T, text string) {
		u, err := smaps.Read(strings.NewReader(text), 0x7f1000000000, 1<<30)
		if err == nil && u.Maps == 0 {
			assert.Zero(t, u)
		}
	})
}
