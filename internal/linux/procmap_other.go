//go:build !(linux && (amd64 || arm64))

package linux

import "os"

// procmapQuery returns no lookup: the file itself answers everything.
func procmapQuery(*os.File) func(addr uintptr) (Mapping, bool, error) { return nil }
