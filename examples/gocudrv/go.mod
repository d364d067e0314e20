module github.com/gopinned/pinned/examples/gocudrv

go 1.25.0

replace github.com/gopinned/pinned => ../..

require (
	github.com/eitamring/gocudrv v0.3.2
	github.com/gopinned/pinned v0.0.0
)
