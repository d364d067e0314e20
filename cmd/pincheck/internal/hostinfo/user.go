package hostinfo

import "github.com/gopinned/pinned/internal/linux"

// User is whom the process runs as. Names are left out.
type User struct {
	UID    int   `json:"uid"`
	GID    int   `json:"gid"`
	Groups []int `json:"groups,omitempty"`
	// SysNice is the capability to move pages between NUMA nodes, and AnyFile that to
	// open files whatever their mode.
	SysNice bool `json:"cap_sys_nice,omitempty"`
	AnyFile bool `json:"cap_dac_override,omitempty"`
}

func readUser(f files) *User {
	c, err := linux.ReadCredentials(f.fsys)
	if err != nil {
		return nil
	}
	return &User{UID: c.UID, GID: c.GID, Groups: c.Groups, SysNice: c.Has(linux.CapSysNice), AnyFile: c.Has(linux.CapDACOverride)}
}
