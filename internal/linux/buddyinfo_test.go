package linux

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const buddyinfo = "Node 0, zone    DMA32      4      4      3      0      0      0      0      0      1      1    600 \n" +
	"Node 1, zone   Normal   2044    700      1      0      0      0      0      0      0      0      0 \n"

func TestBuddyinfo(t *testing.T) {
	t.Parallel()
	all, err := ReadBuddyinfo(fstest.MapFS{"proc/buddyinfo": {Data: []byte(buddyinfo)}})
	require.NoError(t, err)
	require.Len(t, all, 2)
	assert.Equal(t, "DMA32", all[0].Zone)
	assert.Equal(t, 512+600*1024, all[0].Pages(9))
	assert.Equal(t, NUMANode(1), all[1].Node)
	assert.Equal(t, 2044+1400+4, all[1].Pages(0))
	assert.Zero(t, all[1].Pages(9))
}

func TestBuddyinfoRefuses(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"Node 0", "Node x, zone Normal 1", "Node 0, zone Normal one", "\n", "Node 0, area Normal 1"} {
		_, err := ParseBuddyinfo(bad)
		var syntax *SyntaxError
		assert.ErrorAs(t, err, &syntax, "%q", bad)
	}
}

func FuzzBuddyinfo(f *testing.F) {
	f.Add(buddyinfo)
	f.Add("Node 0, zone Normal 18446744073709551615 1")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := ParseBuddyinfo(text)
		for _, b := range all {
			if err != nil || b.Pages(0) < b.Pages(9) || b.Pages(9) < 0 {
				t.Fatalf("%v %+v", err, b)
			}
		}
	})
}
