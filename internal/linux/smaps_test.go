package linux_test

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

const smapsText = `7f1000000000-7f1000400000 rw-p 00000000 00:00 0                          [anon:pinned]
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
THPeligible:           0
VmFlags: rd wr mr mw me ac
7f2000000000-7f2000400000 rw-p 00000000 00:0f 1234                       /anon_hugepage (deleted)
Size:               4096 kB
KernelPageSize:     2048 kB
Rss:                   0 kB
Private_Hugetlb:    4096 kB
VmFlags: rd wr mr mw me de ht
`

func TestParseSMapsSumsTheMappingsThatOverlap(t *testing.T) {
	t.Parallel()
	const a, b = 0x7f1000000000, 0x7f2000000000
	flags := []string{"rd", "wr", "mr", "mw", "me", "dc", "ac", "dd", "hg"}
	for _, tc := range []struct {
		name string
		addr uintptr
		n    int
		want linux.SMaps
	}{
		{"one", a, 4096, linux.SMaps{Start: a, End: a + 4<<20, Maps: 1, Size: 4 << 20, Rss: 4 << 20, AnonHugePages: 4 << 20, PageSize: 4096, Flags: flags, Name: "[anon:pinned]"}},
		{"two", a, 4<<20 + 1, linux.SMaps{Start: a, End: a + 4<<20 + 4096, Maps: 2, Size: 4<<20 + 4096, Rss: 4<<20 + 4096, AnonHugePages: 4 << 20, PageSize: 4096, Flags: flags, Name: "[anon:pinned]"}},
		{"the second", a + 4<<20, 1, linux.SMaps{Start: a + 4<<20, End: a + 4<<20 + 4096, Maps: 1, Size: 4096, Rss: 4096, PageSize: 4096, Flags: []string{"rd", "wr", "mr", "mw", "me", "ac"}}},
		{"hugetlb", b, 1, linux.SMaps{Start: b, End: b + 4<<20, Maps: 1, Size: 4 << 20, Hugetlb: 4 << 20, PageSize: 2 << 20, Flags: []string{"rd", "wr", "mr", "mw", "me", "de", "ht"}, Name: "/anon_hugepage (deleted)"}},
		{"nothing", b - 4096, 4096, linux.SMaps{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := linux.ParseSMaps(strings.NewReader(smapsText), tc.addr, tc.n)
			require.NoError(t, err)
			assert.Equal(t, tc.want, got)
		})
	}
}

func TestParseSMapsRefuses(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"1000-2000 rw-p 0 00:00 0\nRss: many kB\n", "1000-2000 rw-p 0 00:00 0\nRss\n", "1-2 rw-p 0 00:00 0\n1000-2000 rw-p\n"} {
		_, err := linux.ParseSMaps(strings.NewReader(text), 0x1000, 1)
		assert.ErrorContains(t, err, "line 2: ")
	}
}

func TestSMapsOfThisProcess(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("no /proc on " + runtime.GOOS)
	}
	mem := make([]byte, 1<<20)
	mem[0] = 1
	s, err := linux.ReadSMaps(os.DirFS("/"), uintptr(unsafe.Pointer(&mem[0])), len(mem))
	require.NoError(t, err)
	assert.Positive(t, s.Maps)
	assert.GreaterOrEqual(t, s.Size, len(mem))
	assert.True(t, s.HasFlag("rd"), "%v", s.Flags)
	assert.Equal(t, os.Getpagesize(), s.PageSize)
}

func FuzzParseSMaps(f *testing.F) {
	f.Add(smapsText)
	f.Add("1000-2000 rw-p 0 00:00 0\nRss: -1 kB\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := linux.ParseSMaps(strings.NewReader(text), 0x7f1000000000, 1<<30)
		if err == nil && s.Maps == 0 {
			assert.Zero(t, s)
		}
	})
}
