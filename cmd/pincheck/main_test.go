package main

import (
	"os"
	"testing"

	"github.com/gopinned/pinned/internal/bench"
	"github.com/gopinned/pinned/internal/child"
)

// Experiments start this executable again, which is the tests' here.
func TestMain(m *testing.M) {
	child.Serve(bench.Children())
	os.Exit(m.Run())
}
