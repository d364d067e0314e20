//go:build !linux

package weights

import "os"

// dropCache does nothing: only Linux removes pages on request.
func dropCache(*os.File, int64, int, bool) {}
