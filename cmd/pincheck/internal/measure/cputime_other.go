//go:build !unix

package measure

import "time"

// cpuTime is not known on this platform.
func cpuTime() time.Duration { return -1 }
