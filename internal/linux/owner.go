package linux

import "io/fs"

// Owner is the owner of a file, as fs.FileInfo.Sys of a captured host returns it.
type Owner struct{ UID, GID int }

// MajorOf returns the major number of a device node: of the running host, and of a captured one whose Sys is
// a Device. 0 is unknown.
func MajorOf(info fs.FileInfo) int {
	if info.Mode()&fs.ModeCharDevice == 0 {
		return 0
	}
	if d, ok := info.Sys().(Device); ok {
		return d.Major
	}
	return systemMajor(info.Sys())
}

// Device is the owner of a device node and its major number, as fs.FileInfo.Sys of a captured host returns
// them where both are known.
type Device struct {
	Owner
	Major int
}

// OwnerOf returns the owner of a file, and whether it is known: of a file of the running
// host, and of a captured one whose Sys is an Owner.
func OwnerOf(info fs.FileInfo) (Owner, bool) {
	if owner, ok := info.Sys().(Owner); ok {
		return owner, true
	}
	if d, ok := info.Sys().(Device); ok {
		return d.Owner, true
	}
	return systemOwner(info.Sys())
}
