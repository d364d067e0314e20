//go:build !(linux && !android && (amd64 || arm64))

package cudart

type candidate struct {
	path, found string
	version     Version
}

type finder struct{}

func newFinder() finder { return finder{} }

func (finder) candidates() (list []candidate, looked []string) { return nil, nil }

func (finder) driver() DriverFacts { return DriverFacts{} }
