package cudasim

import "github.com/gopinned/pinned/cudart"

// noKernels is every function that loads or launches code: a simulated device runs none.
func (c *call) noKernels() cudart.Code { return cudart.ErrNotSupported }
