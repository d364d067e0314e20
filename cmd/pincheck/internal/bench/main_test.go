package bench

import (
	"os"
	"testing"

	"github.com/gopinned/pinned/cmd/pincheck/internal/probe/child"
)

func TestMain(m *testing.M) {
	child.Serve(Children())
	os.Exit(m.Run())
}
