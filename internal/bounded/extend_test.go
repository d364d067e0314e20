package bounded

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestExtendEndsLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cause := errors.New("cause")
		ctx, cancel := context.WithCancelCause(t.Context())
		extended, stop := Extend(ctx, Grace)
		stopped, stopEarly := Extend(ctx, Grace)
		time.Sleep(time.Minute)
		cancel(cause)
		start := time.Now()
		stopEarly()
		<-stopped.Done()
		require.Equal(t, context.Canceled, context.Cause(stopped))
		<-extended.Done()
		assert.Equal(t, Grace, time.Since(start))
		require.Equal(t, cause, context.Cause(extended))
		stop()

		_, unused := Extend(t.Context(), Grace) // leaves nothing behind: see synctest.Test
		unused()
	})
}

func TestEndedIsNilBeforeTheEnd(t *testing.T) {
	t.Parallel()
	require.NoError(t, Ended(t.Context()))
}
