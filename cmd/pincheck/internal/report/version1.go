package report

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// bandwidth1 is the bandwidth of a device in version 1.
type bandwidth1 struct {
	Size   int           `json:"size_bytes"` // of one copy
	Copies int           `json:"copies_per_sample"`
	Pin    time.Duration `json:"pin_ns"`
	Series []struct {
		Direction string    `json:"direction"`
		Samples   []float64 `json:"samples_gb_per_s"`
	} `json:"series"`
}

// readBandwidth1 takes the bandwidth of devices from JSON of version 1.
func (r *Result) readBandwidth1(data []byte) error {
	var old struct {
		Devices []struct {
			Bandwidth *bandwidth1 `json:"bandwidth"`
		} `json:"devices"`
	}
	if err := json.Unmarshal(data, &old); err != nil {
		return err
	}
	for i := range old.Devices {
		if b := old.Devices[i].Bandwidth; b != nil {
			d := &r.Devices[i]
			d.Bandwidth = b.bench(d.Ordinal)
		}
	}
	return nil
}

func (b *bandwidth1) bench(device int) *result.Bench {
	out := &result.Bench{Name: "link", Complete: true, Notes: []string{
		"of a pincheck that did not compare the copies", "to map, populate and register the memory took " + b.Pin.String()}}
	for _, s := range b.Series {
		out.Series = append(out.Series, result.Series{
			Name: "bandwidth", Unit: result.GBPerSecond, Better: result.Higher,
			Labels: result.Labels{{Key: result.Device, Value: strconv.Itoa(device)}, {Key: result.Memory, Value: "registered"},
				{Key: result.Direction, Value: s.Direction}, {Key: result.Size, Value: strconv.Itoa(b.Size)}},
			Samples: s.Samples, Stats: result.Summarize(s.Samples), BytesPerSample: b.Size * b.Copies,
		})
	}
	return out
}
