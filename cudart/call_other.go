//go:build !(linux && !android && (amd64 || arm64))

package cudart

const platformSupported = false

func callC(c *cCall) { c.result = uintptr(uint32(ErrNotSupported)) }

func newHostFuncEntry(func(uintptr)) uintptr { return 0 }
