package sentinel_test

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/internal/sentinel"
)

func TestSentinel(t *testing.T) {
	closed := sentinel.New("already closed", os.ErrClosed)
	wrapped := fmt.Errorf("copy: %w", closed)
	assert.ErrorIs(t, wrapped, closed)
	assert.ErrorIs(t, wrapped, os.ErrClosed)
	assert.NotErrorIs(t, wrapped, errors.ErrUnsupported)
	assert.NotErrorIs(t, wrapped, sentinel.New("already closed", os.ErrClosed), "each is its own")
	assert.Equal(t, "copy: already closed", wrapped.Error())
}
