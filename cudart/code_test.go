package cudart

import (
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCodesHaveCUDAsNamesAndTexts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		code                Code
		name, text, message string
	}{
		{success, "cudaSuccess", "no error", "cudaSuccess (0): no error"},
		{ErrMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory", "cudaErrorMemoryAllocation (2): out of memory"},
		{ErrInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version",
			"cudaErrorInsufficientDriver (35): CUDA driver version is insufficient for CUDA runtime version"},
		{Code(225), "cudaErrorUnsupportedDevSideSync", "the provided PTX contains unsupported call to cudaDeviceSynchronize",
			"cudaErrorUnsupportedDevSideSync (225): the provided PTX contains unsupported call to cudaDeviceSynchronize"},
		{ErrNotReady, "cudaErrorNotReady", "device not ready", "cudaErrorNotReady (600): device not ready"},
		{ErrHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped",
			"cudaErrorHostMemoryAlreadyRegistered (712): part or all of the requested memory range is already mapped"},
		{Code(721), "cudaErrorTensorMemoryLeak", "tensor memory not completely freed",
			"cudaErrorTensorMemoryLeak (721): tensor memory not completely freed"},
		{Code(915), "cudaErrorInvalidResourceConfiguration", "one or more resources are insufficient or non-applicable for the operation",
			"cudaErrorInvalidResourceConfiguration (915): one or more resources are insufficient or non-applicable for the operation"},
		{ErrUnknown, "cudaErrorUnknown", "unknown error", "cudaErrorUnknown (999): unknown error"},
		{Code(10000), "cudaErrorApiFailureBase", "api failure base", "cudaErrorApiFailureBase (10000): api failure base"},
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

// Names must be C's, and texts without spaces around them.
func TestCodeTableIsSortedAndWhole(t *testing.T) {
	t.Parallel()
	row := regexp.MustCompile(`^(\d{1,9}) (cudaSuccess|cudaError[A-Z][A-Za-z]+) (CUDA_[A-Z_]+|-) (\S.*\S)$`)
	names, last, drivers := map[string]bool{}, -1, 0
	for i, line := range strings.Split(strings.TrimSuffix(codesText, "\n"), "\n") {
		if strings.HasPrefix(line, "# ") {
			continue
		}
		m := row.FindStringSubmatch(line)
		require.NotNil(t, m, "line %d: not NUMBER cudaErrorNAME CUDA_ERROR_NAME TEXT: %q", i+1, line)
		number, err := strconv.Atoi(m[1])
		require.NoError(t, err)
		assert.Less(t, last, number, line)
		assert.NotContains(t, names, m[2])
		if m[3] == "-" {
			m[3] = ""
		} else {
			assert.NotContains(t, names, m[3])
			names[m[3]] = true
			drivers++
		}
		assert.Equal(t, codeInfo{m[2], m[3], m[4]}, codeTable()[Code(number)])
		last, names[m[2]] = number, true
	}
	// 125 codes in 11.8, 4 more in 12.4, 5 more by 13.0.
	assert.Len(t, names, 134+drivers)
	assert.Equal(t, 99, drivers)
	assert.Len(t, codeTable(), 134)
}

func TestConstantsHaveTheNamesOfTheirCodes(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("codes.go")
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("the source is not here")
	}
	require.NoError(t, err)
	constants := regexp.MustCompile(`(?m)^\t(?:[Ee]rr(\w+)|success) +Code = (\d+) +// (.*)$`).FindAllSubmatch(source, -1)
	require.Greater(t, len(constants), 40)
	for _, c := range constants {
		number, err := strconv.Atoi(string(c[2]))
		require.NoError(t, err)
		name := "cudaSuccess"
		if len(c[1]) > 0 {
			name = "cudaError" + string(c[1])
		}
		info := codeTable()[Code(number)]
		assert.Equal(t, [2]string{name, string(c[3])}, [2]string{info.name, info.text})
	}
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
