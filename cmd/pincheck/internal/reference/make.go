package reference

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// Make returns the file of a machine from what the experiment bandwidth measured on its GPUs, which are all of its type:
// the copies of registered memory, with the samples of all GPUs together. Source names the program that measured.
func Make(m Machine, b *result.Bench, source string) (*File, error) {
	f := &File{Kind: Measured, Machine: m}
	samples := map[Row][]float64{}
	for _, s := range b.Series {
		size, err := strconv.Atoi(s.Labels.Get(result.Size))
		if err != nil || size < smallestCopy || !isCopy(&s) || s.Labels.Get(result.Memory) != registered || len(s.Samples) == 0 {
			continue
		}
		r := Row{What: bandwidth, Direction: s.Labels.Get(result.Direction), Size: size, Unit: s.Unit, Date: b.Started.UTC().Format(time.DateOnly), Source: source}
		if samples[r] == nil {
			f.Rows = append(f.Rows, r)
		}
		samples[r] = slices.Concat(samples[r], s.Samples)
	}
	if len(f.Rows) == 0 {
		return nil, errors.New("there is no copy of registered memory of 4 MiB or more")
	}
	for i := range f.Rows {
		r := &f.Rows[i]
		all := samples[*r]
		stats := result.Summarize(all)
		r.N, r.Median, r.Min, r.Max = len(all), rounded(stats.Median), rounded(stats.Min), rounded(stats.Max)
	}
	return f, f.check()
}

// rounded returns the value with four digits: samples have no more.
func rounded(v float64) float64 {
	v, _ = strconv.ParseFloat(fmt.Sprintf("%.4g", v), 64)
	return v
}

// JSON returns the file as [Read] reads it.
func (f *File) JSON() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	err := e.Encode(f)
	return b.Bytes(), err
}
