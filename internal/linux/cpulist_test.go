package linux_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestParseCPUList(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		text   string
		want   linux.CPUList
		string string
	}{
		{"", nil, ""},
		{"\n", nil, ""},
		{"0\n", linux.CPUList{0}, "0"},
		{"0-3", linux.CPUList{0, 1, 2, 3}, "0-3"},
		{"0-1,8,10-11\n", linux.CPUList{0, 1, 8, 10, 11}, "0-1,8,10-11"},
		{"4,0-2,1", linux.CPUList{0, 1, 2, 4}, "0-2,4"},
		{"7-7", linux.CPUList{7}, "7"},
		{"65534-65535", linux.CPUList{65534, 65535}, "65534-65535"},
	} {
		got, err := linux.ParseCPUList(tc.text)
		require.NoError(t, err, tc.text)
		assert.Equal(t, tc.want, got, tc.text)
		assert.Equal(t, tc.string, got.String(), tc.text)
	}
	for _, text := range []string{"a", "0-", "-1", "-", "3-1", "1,,2", "1,", "0 1", "0-4294967295", "65536", "99999999999999999999", "0-18446744073709551615", "0x1", "0-65535,0-65535"} {
		list, err := linux.ParseCPUList(text)
		assert.Error(t, err, "%q", text)
		assert.Nil(t, list, "%q", text)
	}
}

func FuzzParseCPUList(f *testing.F) {
	for _, text := range []string{"0-3,8", "", "1-", "0-99999", "7-2", "0-65535,1", "1,0,1"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		list, err := linux.ParseCPUList(text)
		if err != nil {
			require.Nil(t, list)
			return
		}
		require.Equal(t, strings.TrimSpace(text) == "", len(list) == 0)
		require.True(t, slices.IsSorted(list))
		again, err := linux.ParseCPUList(list.String())
		require.NoError(t, err)
		require.Equal(t, list, again)
		for i, n := range list {
			require.True(t, n >= 0 && n < 1<<16 && (i == 0 || n > list[i-1]), "%d", n)
		}
	})
}
