//go:build amd64 || arm64

package stage

// relax is a hint to the core that the goroutine spins, so that the core's other thread
// has it meanwhile.
func relax()
