//go:build !(amd64 || arm64)

package poll

// core does nothing where no instruction is known.
func core() {}
