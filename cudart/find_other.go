//go:build !(linux && !android && (amd64 || arm64))

package cudart

import "os"

type candidate struct {
	path, found string
	version     Version
}

type finder struct{}

func newFinder() finder { return finder{} }

func (finder) candidates() (list []candidate, looked []string) { return nil, nil }

func (finder) driver() DriverFacts { return DriverFacts{} }

func getenv(name string) string { return os.Getenv(name) }
