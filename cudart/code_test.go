package cudart

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCodeSaysWhatCUDASays(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		code                Code
		name, text, message string
	}{
		{Success, "cudaSuccess", "no error", "cudaSuccess (0): no error"},
		{ErrMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory", "cudaErrorMemoryAllocation (2): out of memory"},
		{ErrInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version",
			"cudaErrorInsufficientDriver (35): CUDA driver version is insufficient for CUDA runtime version"},
		{ErrUnsupportedDevSideSync, "cudaErrorUnsupportedDevSideSync", "the provided PTX contains unsupported call to cudaDeviceSynchronize",
			"cudaErrorUnsupportedDevSideSync (225): the provided PTX contains unsupported call to cudaDeviceSynchronize"},
		{ErrNotReady, "cudaErrorNotReady", "device not ready", "cudaErrorNotReady (600): device not ready"},
		{ErrHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped",
			"cudaErrorHostMemoryAlreadyRegistered (712): part or all of the requested memory range is already mapped"},
		{ErrTensorMemoryLeak, "cudaErrorTensorMemoryLeak", "tensor memory not completely freed",
			"cudaErrorTensorMemoryLeak (721): tensor memory not completely freed"},
		{ErrInvalidResourceConfiguration, "cudaErrorInvalidResourceConfiguration", "one or more resources are insufficient or non-applicable for the operation",
			"cudaErrorInvalidResourceConfiguration (915): one or more resources are insufficient or non-applicable for the operation"},
		{ErrUnknown, "cudaErrorUnknown", "unknown error", "cudaErrorUnknown (999): unknown error"},
		{ErrApiFailureBase, "cudaErrorApiFailureBase", "api failure base", "cudaErrorApiFailureBase (10000): api failure base"},
	} {
		assert.Equal(t, tt.name, tt.code.Name())
		assert.Equal(t, tt.text, tt.code.Text())
		assert.EqualError(t, tt.code, tt.message)
	}
}

func TestUnknownCodesKeepTheirNumberAndLookLikeNoName(t *testing.T) {
	t.Parallel()
	for _, c := range []Code{-1, 10, 11, 33, 916, 998, 1000, 9999, 10001, math.MinInt32, math.MaxInt32} {
		assert.Equal(t, fmt.Sprintf("unrecognized cudaError_t (%d): unrecognized error code", int32(c)), c.Error())
		assert.NotRegexp(t, `^cuda`, c.Name())
	}
}

// The binary search needs the order; names must be C's, and texts without spaces around
// them.
func TestCodeTableIsSortedAndWhole(t *testing.T) {
	t.Parallel()
	names := map[string]Code{}
	for i, row := range codeTable {
		if i > 0 {
			assert.Less(t, codeTable[i-1].code, row.code, row.name)
		}
		if row.code != Success {
			assert.Regexp(t, `^cudaError[A-Z][A-Za-z]+$`, row.name)
		}
		assert.NotEmpty(t, row.text, row.name)
		assert.Equal(t, strings.TrimSpace(row.text), row.text)
		assert.NotContains(t, names, row.name)
		names[row.name] = row.code

		assert.Equal(t, row.name, row.code.Name())
		assert.Equal(t, row.text, row.code.Text())
	}
	// 125 codes in 11.8, 4 more in 12.4, 5 more by 13.0.
	assert.Len(t, codeTable, 134)
}

func TestCodeIsFoundThroughWrapping(t *testing.T) {
	t.Parallel()
	err := fmt.Errorf("allocate 1 GiB: %w", ErrMemoryAllocation)
	require.ErrorIs(t, err, ErrMemoryAllocation)
	require.NotErrorIs(t, err, ErrInvalidValue)
	require.NotErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorIs(t, &Error{Op: "cudaHostRegister", Code: ErrNotSupported}, errors.ErrUnsupported)
	require.ErrorIs(t, &Error{Op: "cudaMemcpyBatchAsync", Code: ErrCallRequiresNewerDriver}, errors.ErrUnsupported)
	var code Code
	require.True(t, errors.As(err, &code))
	assert.Equal(t, ErrMemoryAllocation, code)
}
