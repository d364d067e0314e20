package linux

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const credentials = "Name:\tx\nUid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t4 27 44 \nCapEff:\t0000000000800000\n"

func TestCredentials(t *testing.T) {
	t.Parallel()
	c, err := ReadCredentials(fstest.MapFS{"proc/self/status": {Data: []byte(credentials)}})
	require.NoError(t, err)
	assert.Equal(t, Credentials{UID: 1000, GID: 1000, Groups: []int{4, 27, 44}, Capabilities: 1 << CapSysNice}, c)
	assert.True(t, c.Has(CapSysNice))
	assert.False(t, c.Has(CapDACOverride))
	for _, f := range []struct {
		mode     fs.FileMode
		uid, gid int
		may      bool
	}{
		{0o666, 0, 0, true},
		{0o660, 0, 0, false},
		{0o660, 0, 44, true},
		{0o660, 0, 1000, true},
		{0o600, 1000, 0, true},
		{0o606, 0, 44, false}, // the group's bits count for its members, not those of others
		{0o444, 0, 0, false},
	} {
		assert.Equal(t, f.may, c.MayOpen(f.mode, Owner{f.uid, f.gid}), "%+v", f)
	}
	c.Capabilities = 1 << CapDACOverride
	assert.True(t, c.MayOpen(0, Owner{}))
}

func FuzzCredentials(f *testing.F) {
	f.Add(credentials)
	f.Add("Uid:\t1\nGid:\t1\n")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := ParseCredentials(text)
		if err != nil && (c.UID != 0 || len(c.Groups) > 0) {
			t.Fatalf("half of a file: %+v", c)
		}
	})
}
