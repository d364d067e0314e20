//go:build !(linux && !android && (amd64 || arm64))

package cudart

import "time"

type sleeper struct{}

func newSleeper() *sleeper { return new(sleeper) }

func (b *sleeper) precise()                {}
func (b *sleeper) wait(time.Duration) bool { return false }
func (b *sleeper) wake()                   {}
func (b *sleeper) close()                  {}
