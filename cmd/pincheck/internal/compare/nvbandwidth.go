package compare

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// nvbandwidth is the JSON of nvbandwidth -j, versions 0.8 and later.
type nvbandwidth struct {
	Version   string       `json:"version"`
	Error     string       `json:"error"`
	Warning   string       `json:"warning"`
	Devices   []string     `json:"GPU Device list"` // "0: NVIDIA H200 (00000000:00:06): (host)"
	Testcases []nvTestcase `json:"testcases"`
}

type nvTestcase struct {
	Name        string   `json:"name"`
	Status      string   `json:"status"` // Passed, Waived, Running after a failure
	Error       string   `json:"error"`
	Description string   `json:"bandwidth_description"`
	Matrix      [][]cell `json:"bandwidth_matrix"` // for the host one row, a column a GPU
}

// cell is a number as a string, or as a number, or N/A, which is 0.
type cell float64

func (c *cell) UnmarshalJSON(data []byte) error {
	text := string(data)
	if unquoted := ""; json.Unmarshal(data, &unquoted) == nil {
		text = unquoted
	}
	if text == "N/A" || text == "null" {
		return nil
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || !(v >= 0 && v < 1e9) {
		return fmt.Errorf("bandwidth_matrix: %.40q is no bandwidth", text)
	}
	*c = cell(v)
	return nil
}

// Its testcases between the host and one GPU at a time. Those with copies both ways
// report the direction that they are named after, while the other one runs.
var (
	nvDirections = map[string]string{
		"host_to_device_memcpy": result.HostToDevice,
		"device_to_host_memcpy": result.DeviceToHost,
	}
	nvBothWays = map[string]string{
		"host_to_device_bidirectional_memcpy": result.HostToDevice,
		"device_to_host_bidirectional_memcpy": result.DeviceToHost,
	}
)

var nvHost = regexp.MustCompile(`: \(([^()]+)\)$`)

// ParseNVBandwidth returns the copies between pinned memory and each GPU as series of the
// bench bandwidth. The JSON does not say how large the copies were, and has one value a
// GPU, the median of its samples, so nothing can be tested.
func ParseNVBandwidth(raw json.RawMessage) (Document, error) {
	var in nvbandwidth
	if err := json.Unmarshal(raw, &in); err != nil {
		return Document{}, fmt.Errorf("nvbandwidth: %w", err)
	}
	d := Document{Tool: strings.TrimSpace("nvbandwidth " + in.Version), Complete: true}
	if len(in.Devices) > 0 {
		if m := nvHost.FindStringSubmatch(in.Devices[0]); m != nil {
			d.Host = m[1]
		}
	}
	for _, message := range []string{in.Error, in.Warning} {
		if message != "" {
			d.Notes = append(d.Notes, "nvbandwidth: "+message)
		}
	}
	var all nvSeries
	for _, t := range in.Testcases {
		if t.Status != "Passed" {
			d.Notes = append(d.Notes, strings.TrimSpace(fmt.Sprintf("nvbandwidth: %s: %s %s", t.Name, strings.ToLower(t.Status), t.Error)))
			d.Complete = d.Complete && t.Status == "Waived"
			continue
		}
		all.add(t)
	}
	if all.sum() {
		d.Notes = append(d.Notes, "nvbandwidth measures each direction in a run of its own while the other one is busy: both is the sum of the two")
	}
	if len(all.others) > 0 {
		d.Notes = append(d.Notes, "nvbandwidth: not compared: "+strings.Join(all.others, ", "))
	}
	b := result.Bench{Name: "bandwidth", Complete: true, Series: all.series}
	if len(b.Series) == 0 {
		text := "nvbandwidth: no testcase between the host and a GPU passed, such as host_to_device_memcpy_ce"
		if len(d.Notes) > 0 {
			text += " (" + strings.Join(d.Notes, "; ") + ")"
		}
		return Document{}, errors.New(text)
	}
	d.Benches = []result.Bench{b}
	return d, nil
}

// nvSeries collects the series of testcases.
type nvSeries struct {
	series []result.Series
	both   map[nvHalf]map[string]float64 // by direction
	order  []nvHalf                      // of both
	others []string                      // names of testcases without a series
}

// An nvHalf is a GPU, and the method that copies in both directions at once.
type nvHalf struct {
	method string
	gpu    int
}

// add adds the GPUs of a testcase.
func (s *nvSeries) add(t nvTestcase) {
	at := strings.LastIndexByte(t.Name, '_')
	kind, method := t.Name[:max(at, 0)], t.Name[at+1:]
	one, ways := nvDirections[kind], nvBothWays[kind]
	if one == "" && ways == "" || len(t.Matrix) != 1 || method != "ce" && method != "sm" {
		s.others = append(s.others, t.Name)
		return
	}
	for gpu, v := range t.Matrix[0] {
		h := nvHalf{method, gpu}
		switch {
		case v == 0: // not measured
		case one != "":
			s.of(h, one, float64(v))
		case s.both[h] == nil:
			if s.both == nil {
				s.both = map[nvHalf]map[string]float64{}
			}
			s.both[h], s.order = map[string]float64{ways: float64(v)}, append(s.order, h)
		default:
			s.both[h][ways] = float64(v)
		}
	}
}

// of adds a series.
func (s *nvSeries) of(h nvHalf, direction string, v float64) {
	labels := result.Labels{{Key: result.Device, Value: strconv.Itoa(h.gpu)}, {Key: result.Direction, Value: direction}}
	if h.method != "ce" { // the copy engine, as for cudaMemcpyAsync
		labels = labels.With(result.Method, h.method)
	}
	one := result.Single("bandwidth", labels, result.GBPerSecond, v)
	one.Better = result.Higher
	s.series = append(s.series, one)
}

// sum adds the sums of both directions, and reports whether there are any.
func (s *nvSeries) sum() bool {
	measured := len(s.series)
	for _, h := range s.order {
		if both := s.both[h]; len(both) == 2 {
			s.of(h, result.Both, both[result.HostToDevice]+both[result.DeviceToHost])
		}
	}
	return len(s.series) > measured
}
