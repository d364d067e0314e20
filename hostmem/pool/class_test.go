package pool

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestClassesHoldTheirSizesWithBoundedWaste(t *testing.T) {
	t.Parallel()
	check := func(n int) {
		class := classOf(n)
		require.True(t, class >= 0 && class < classes, "class %d of %d bytes", class, n)
		size := classSize(class)
		require.GreaterOrEqual(t, size, n)
		if class > 0 {
			require.Less(t, classSize(class-1), n, "%d bytes fit the class before", n)
		}
		require.Less(t, size-n, max(granule, (n+7)/8), "waste of %d bytes in %d", n, size)
		require.Zero(t, size%granule)
	}
	for n := 1; n <= 1<<13; n++ {
		check(n)
	}
	for class := range classes {
		check(classSize(class))
		if class > 0 {
			check(classSize(class-1) + 1)
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		check(1 + random.IntN(1<<random.IntN(maxShift+1)))
	}
	require.Equal(t, maxBlock, classSize(classes-1))
}
