package result

import (
	"slices"
	"strconv"
	"time"
)

// A Bench is what one experiment measured.
type Bench struct {
	Name     string   `json:"bench"`
	Question string   `json:"question"`
	Answers  []string `json:"answers"`           // sentences: the headline first
	Figures  []Table  `json:"figures,omitempty"` // behind the answers: the key figures
	Notes    []string `json:"notes"`             // what was left out and why, and what disturbed
	Errors   []string `json:"errors"`            // of cases that failed
	Series   []Series `json:"series"`
	// Unmeasured are series that the host, the driver or the GPU does not allow to measure.
	// Notes say the same in words.
	Unmeasured []Unmeasured `json:"unmeasured,omitempty"`
	Views      []View       `json:"views"`
	// Complete is false if the run ended early: what is there was measured.
	Complete bool      `json:"complete"`
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"took_s"`
}

// Unit is the unit of a series.
type Unit string

// The units.
const (
	GBPerSecond Unit = "gb_per_s"
	Seconds     Unit = "s"
	Bytes       Unit = "bytes"
	Ratio       Unit = "ratio"
	PerSecond   Unit = "per_s" // of what the series is named after
	Count       Unit = "count"
	Share       Unit = "share" // of a whole, 1 for all of it; figures only
)

// Better is the direction in which values of a series are better.
type Better string

// The directions.
const (
	Higher Better = "higher"
	Lower  Better = "lower"
)

// A Series is one quantity under one set of conditions.
type Series struct {
	Name   string `json:"name"` // of the quantity, such as bandwidth
	Labels Labels `json:"labels"`
	Unit   Unit   `json:"unit"`
	Better Better `json:"better,omitempty"` // empty if neither
	// Samples are in the order in which they were taken.
	Samples []float64 `json:"samples"`
	Stats
	BytesPerSample  int      `json:"bytes_per_sample,omitempty"`
	CPUSecondsPerGB *float64 `json:"cpu_s_per_gb,omitempty"` // of this process, all threads
	Verified        bool     `json:"verified"`               // the bytes were compared afterwards, and right
	Mismatch        string   `json:"mismatch,omitempty"`     // the first of them that was wrong
	NUMANode        *int     `json:"numa_node,omitempty"`    // of the host memory
	// ShareOfLink is Median over the rate of the device's link as it was under load, nil if
	// that is unknown.
	ShareOfLink *float64 `json:"share_of_link,omitempty"`
	// Expected has the reference figures of such hardware, nil if there are none.
	Expected *Expected `json:"expected,omitempty"`
}

// Unmeasured is a series that could not be measured.
type Unmeasured struct {
	Name   string `json:"name"` // of the quantity
	Labels Labels `json:"labels"`
	Reason string `json:"reason"`
}

// Expected is the expected value of a series, with its source.
type Expected struct {
	Value  float64 `json:"value"` // in the series' unit
	Source string  `json:"source"`
	// Of is whose figure Value is, in words that follow "90 % of": "what such a GPU reaches on such
	// a link". Source names the row or the flag.
	Of string `json:"-"`
	// Brief is Source in few words: the machine that was measured, and when.
	Brief string `json:"-"`
}

// Labels are the conditions of a series, in the order in which they matter.
type Labels []Label

// A Label is one condition, such as direction and host_to_device. Sizes are
// in bytes: size_bytes and 4096.
type Label struct{ Key, Value string }

// Keys of labels that several experiments use.
const (
	Device    = "device"
	Direction = "direction"
	Size      = "size_bytes"
	Memory    = "memory"
	Method    = "method"
	Blocks    = "blocks" // number of blocks of one call
)

// Values of Direction.
const (
	HostToDevice = "host_to_device"
	DeviceToHost = "device_to_host"
	Both         = "both"
)

// Get returns the value of a label, or "".
func (l Labels) Get(key string) string {
	for _, label := range l {
		if label.Key == key {
			return label.Value
		}
	}
	return ""
}

// Size returns the size in bytes, or 0 if the labels have no size.
func (l Labels) Size() int {
	n, _ := strconv.Atoi(l.Get(Size))
	return n
}

// With returns the labels and another one behind them, which replaces one of its key.
func (l Labels) With(key, value string) Labels {
	out := slices.DeleteFunc(slices.Clone(l), func(label Label) bool { return label.Key == key })
	return append(out, Label{key, value})
}

// A View is how series of one name are to be shown: as a table, and as a plot where the
// values of X are numbers.
type View struct {
	Title  string   `json:"title"`
	Series string   `json:"series"`         // their Name
	Where  Labels   `json:"where"`          // conditions that all have
	X      string   `json:"x"`              // key of the label along the axis, or down the table
	Lines  []string `json:"lines"`          // keys of the labels that tell lines, or columns, apart
	Main   bool     `json:"main,omitempty"` // one to show with the answers, also in short texts
}

// Select returns the series that a view shows, in their order.
func (b *Bench) Select(v View) []*Series {
	var out []*Series
	for i := range b.Series {
		s := &b.Series[i]
		if s.Name == v.Series && !slices.ContainsFunc(v.Where, func(l Label) bool { return s.Labels.Get(l.Key) != l.Value }) {
			out = append(out, s)
		}
	}
	return out
}

// Find returns the first series of a name that has all of the labels, or nil.
func (b *Bench) Find(name string, where ...Label) *Series {
	if all := b.Select(View{Series: name, Where: where}); len(all) > 0 {
		return all[0]
	}
	return nil
}
