package bounded

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCallbackReturnsTheOutcome(t *testing.T) {
	t.Parallel()
	for _, ctx := range []context.Context{context.Background(), t.Context()} {
		n, err := Callback(ctx, work)
		assert.Equal(t, 1, n)
		assert.Equal(t, errWork, err)
		_, err = Callback(ctx, func() (int, error) { runtime.Goexit(); return 0, nil })
		assert.Equal(t, ErrExited, err)
		_, err = Callback(ctx, func() (int, error) { panic("boom") })
		assert.ErrorContains(t, err, "panic: boom")
	}
}

func TestCallbackAbandonsACallThatBlocks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cause := errors.New("cause")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Minute, func() { cancel(cause) })
		start := time.Now()
		n, err := Callback(ctx, func() (int, error) {
			<-ctx.Done()
			time.Sleep(CallbackGrace - 1)
			return work()
		})
		assert.Equal(t, 1, n)
		assert.Equal(t, errWork, err, "it heeds the context")
		n, err = Callback(ctx, func() (int, error) {
			time.Sleep(time.Hour)
			return 1, nil
		})
		assert.Zero(t, n)
		require.ErrorIs(t, err, cause)
		require.ErrorIs(t, err, context.Canceled)
		assert.Equal(t, time.Minute+2*CallbackGrace-1, time.Since(start))
		time.Sleep(time.Hour)
	})
}
