package lifetime_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/lifetime"
)

func TestStackRunsAllBackward(t *testing.T) {
	var s lifetime.Stack
	var order []int
	failed := errors.New("failed")
	s.PushClose(func() error { order = append(order, 1); return nil })
	s.Push(func(ctx context.Context) error {
		assert.Equal(t, t.Context(), ctx)
		order = append(order, 2)
		return failed
	})
	s.PushClose(func() error { order = append(order, 3); return nil })
	require.ErrorIs(t, s.Run(t.Context()), failed)
	assert.Equal(t, []int{3, 2, 1}, order)
	require.NoError(t, s.Run(t.Context()), "what was released is not released again")
	assert.Len(t, order, 3)
}
