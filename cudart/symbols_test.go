package cudart

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
)

// Each version of the runtime has at most one row for a function.
func TestSymbolRowsDoNotOverlap(t *testing.T) {
	t.Parallel()
	for _, version := range []Version{11000, 11020, 11080, 12000, 12010, 12020, 12040, 12080, 12090, 13000, 13010} {
		var rows [maxFunctions]int
		for i := range symbols {
			if s := &symbols[i]; s.serves(version) {
				rows[s.fn]++
			}
		}
		for fn, n := range rows {
			assert.LessOrEqual(t, n, 1, "%s in %v", function(fn).name(), version)
		}
	}
}

// A function that is missing is named as the library's version names it.
func TestMissingFunctionIsNamedAsItsVersionNamesIt(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		fn      function
		runtime Version
		want    string
	}{
		{fnMemPrefetch, 11080, "cudaMemPrefetchAsync: not exported by libcudart.so (runtime 11.8), needs another build of the library"},
		{fnMemPrefetch, 12040, "cudaMemPrefetchAsync_v2: not exported by libcudart.so (runtime 12.4), needs another build of the library"},
		{fnMemPrefetch, 13000, "cudaMemPrefetchAsync: not exported by libcudart.so (runtime 13.0), needs another build of the library"},
		{fnMemAdvise, 12020, "cudaMemAdvise_v2: not exported by libcudart.so (runtime 12.2), needs another build of the library"},
		{fnMemcpyBatch, 12040, "cudaMemcpyBatchAsync: not exported by libcudart.so (runtime 12.4), needs CUDA 12.8 or later"},
		{fnMemcpyBatch, 13000, "cudaMemcpyBatchAsync: not exported by libcudart.so (runtime 13.0), needs another build of the library"},
		{fnMallocAsync, 11010, "cudaMallocAsync: not exported by libcudart.so (runtime 11.1), needs CUDA 11.2 or later"},
		{fnMallocManaged, 11080, "cudaMallocManaged: not exported by libcudart.so (runtime 11.8), needs another build of the library"},
	} {
		rt := &Runtime{lib: Library{Path: "libcudart.so", Runtime: tt.runtime}}
		err := rt.missing(tt.fn)
		assert.ErrorIs(t, err, errors.ErrUnsupported)
		assert.EqualError(t, err, tt.want+": "+errors.ErrUnsupported.Error())
	}
}
