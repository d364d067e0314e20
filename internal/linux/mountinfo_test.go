package linux_test

import (
	"path"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestParseMounts(t *testing.T) {
	t.Parallel()
	got, err := linux.ParseMounts("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n" +
		`32 31 0:29 / /mnt/a\040b\011c\012d\134e rw shared:3 master:1 - cgroup cgroup rw,cpu,cpuacct` + "\n" +
		"40 31 0:30 / /no/source rw - tmpfs  rw\n" +
		"41 31 0:4 net:[4026532281] /run/netns/a rw - nsfs nsfs rw\n")
	require.NoError(t, err)
	assert.Equal(t, []linux.Mount{
		{Device: "98:0", Root: "/mnt1", Point: "/mnt2", Type: "ext3", Options: []string{"rw", "errors=continue"}},
		{Device: "0:29", Root: "/", Point: "/mnt/a b\tc\nd\\e", Type: "cgroup", Options: []string{"rw", "cpu", "cpuacct"}},
		{Device: "0:30", Root: "/", Point: "/no/source", Type: "tmpfs", Options: []string{"rw"}},
		{Device: "0:4", Root: "net:[4026532281]", Point: "/run/netns/a", Type: "nsfs", Options: []string{"rw"}},
	}, got)
	assert.True(t, got[1].HasOption("cpuacct"))
	assert.False(t, got[1].HasOption("memory"))
	for _, line := range []string{"", "36 35 98:0 /mnt1 /mnt2 rw,noatime", "36 35 98:0 /mnt1 - ext3 x rw", "36 35 98:0 /mnt1 mnt2 rw - ext3 x rw", "36 35 98:0 /mnt1 /mnt2 rw - ext3 x"} {
		_, err := linux.ParseMounts("1 0 0:1 / / rw - ext4 x rw\n" + line + "\n")
		assert.ErrorContains(t, err, "line 2: ", "%q", line)
	}
}

func TestMountEscapes(t *testing.T) {
	t.Parallel()
	for escaped, want := range map[string]string{`/\`: `/\`, `/\04`: `/\04`, `/\0400`: `/ 0`, `/\999`: `/\999`, `/\400`: `/\400`, `/\043\134040`: `/#\040`} {
		got, err := linux.ParseMounts("1 0 0:1 / " + escaped + " rw - ext4 x rw\n")
		require.NoError(t, err, escaped)
		assert.Equal(t, want, got[0].Point, escaped)
	}
}

func FuzzParseMounts(f *testing.F) {
	f.Add("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n")
	f.Add(`32 31 0:29 / /mnt/a\040b rw - cgroup2  rw`)
	f.Fuzz(func(t *testing.T, text string) {
		mounts, err := linux.ParseMounts(text)
		if err != nil {
			require.Nil(t, mounts)
		}
		for _, m := range mounts {
			require.True(t, path.IsAbs(m.Point), "%q", m.Point)
			require.NotEmpty(t, m.Options)
		}
	})
}
