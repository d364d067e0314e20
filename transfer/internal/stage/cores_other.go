//go:build !linux

package stage

import (
	"math"

	"github.com/gopinned/pinned/cudart"
)

type cores struct{}

func coresOf(*cudart.Device) (int, cores) { return 0, cores{} }

func (cores) count() int { return math.MaxInt32 }

func (cores) bind() func() { return func() {} }
