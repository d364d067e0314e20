//go:build !linux || android || !(amd64 || arm64)

package cudart

func handlersWithoutStack() []string { return nil }
