package linux

import "io/fs"

// Owner is the owner of a file, as fs.FileInfo.Sys of a captured host returns it.
type Owner struct{ UID, GID int }

// OwnerOf returns the owner of a file, and whether it is known: of a file of the running
// host, and of a captured one whose Sys is an Owner.
func OwnerOf(info fs.FileInfo) (Owner, bool) {
	if owner, ok := info.Sys().(Owner); ok {
		return owner, true
	}
	return systemOwner(info.Sys())
}
