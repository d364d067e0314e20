package report

import (
	"bytes"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestWriteEstimates(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	WriteEstimates(&b, []Estimate{
		{Name: "bandwidth", Time: 12 * time.Second, Pinned: 4 << 30, Pageable: 1 << 30, Device: 4 << 30, Disk: 1 << 20},
		{Name: "calls", Time: 300 * time.Millisecond},
	})
	WriteEstimates(&b, []Estimate{{Name: "calls", Time: 300 * time.Millisecond}})
	WriteEstimates(&b, nil)
	assert.Equal(t, "2 experiments: about 12.3 s, at most 4 GiB pinned, 1 GiB pageable, 4 GiB on each GPU, 1 MiB on disk\n"+
		"calls: about 300 ms\n", b.String())
}

func TestListsThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	WriteEstimates(failing{}, []Estimate{{Name: "x"}})
	assert.Error(t, WriteList(failing{}, [][2]string{{"a", "b"}}, Style{}))
	assert.NoError(t, WriteList(io.Discard, nil, Style{}))
}
