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
	Version   string   `json:"version"`
	Error     string   `json:"error"`
	Warning   string   `json:"warning"`
	Devices   []string `json:"GPU Device list"` // "0: NVIDIA H200 (00000000:00:06): (host)"
	Testcases []struct {
		Name        string   `json:"name"`
		Status      string   `json:"status"` // Passed, Waived, Running after a failure
		Error       string   `json:"error"`
		Description string   `json:"bandwidth_description"`
		Matrix      [][]cell `json:"bandwidth_matrix"` // for the host one row, a column a GPU
	} `json:"testcases"`
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
	b := result.Bench{Name: "bandwidth", Complete: true}
	add := func(method string, gpu int, direction string, v float64) {
		labels := result.Labels{{Key: result.Device, Value: strconv.Itoa(gpu)}, {Key: result.Direction, Value: direction}}
		if method != "ce" { // the copy engine, as for cudaMemcpyAsync
			labels = labels.With(result.Method, method)
		}
		b.Series = append(b.Series, result.Series{Name: "bandwidth", Labels: labels, Unit: result.GBPerSecond, Better: result.Higher,
			Samples: []float64{v}, Stats: result.Summarize([]float64{v})})
	}
	type half struct {
		method string
		gpu    int
	}
	both := map[half]map[string]float64{}
	var order []half
	var others []string
	for _, t := range in.Testcases {
		at := strings.LastIndexByte(t.Name, '_')
		kind, method := t.Name[:max(at, 0)], t.Name[at+1:]
		one, ways := nvDirections[kind], nvBothWays[kind]
		switch {
		case t.Status != "Passed":
			d.Notes = append(d.Notes, strings.TrimSpace(fmt.Sprintf("nvbandwidth: %s: %s %s", t.Name, strings.ToLower(t.Status), t.Error)))
			d.Complete = d.Complete && t.Status == "Waived"
			continue
		case one == "" && ways == "" || len(t.Matrix) != 1 || method != "ce" && method != "sm":
			others = append(others, t.Name)
			continue
		}
		for gpu, v := range t.Matrix[0] {
			switch {
			case v == 0: // not measured
			case one != "":
				add(method, gpu, one, float64(v))
			default:
				h := half{method, gpu}
				if both[h] == nil {
					both[h] = map[string]float64{}
					order = append(order, h)
				}
				both[h][ways] = float64(v)
			}
		}
	}
	measured := len(b.Series)
	for _, h := range order {
		if sum := both[h]; len(sum) == 2 {
			add(h.method, h.gpu, result.Both, sum[result.HostToDevice]+sum[result.DeviceToHost])
		}
	}
	if len(b.Series) > measured {
		d.Notes = append(d.Notes, "nvbandwidth measures each direction in a run of its own while the other one is busy: both is the sum of the two")
	}
	if len(others) > 0 {
		d.Notes = append(d.Notes, "nvbandwidth: not compared: "+strings.Join(others, ", "))
	}
	if len(b.Series) == 0 {
		return Document{}, errors.New("nvbandwidth: no testcase between the host and a GPU passed, such as host_to_device_memcpy_ce" + suffix(d.Notes))
	}
	d.Benches = []result.Bench{b}
	return d, nil
}

func suffix(notes []string) string {
	if len(notes) == 0 {
		return ""
	}
	return " (" + strings.Join(notes, "; ") + ")"
}
