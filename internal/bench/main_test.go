package bench

import (
	"os"
	"testing"

	"github.com/gopinned/pinned/internal/child"
)

func TestMain(m *testing.M) {
	child.Serve(Children())
	os.Exit(m.Run())
}
