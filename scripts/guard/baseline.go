package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// programTimeout ends a program in C.
const programTimeout = 2 * time.Minute

// A program is one of testdata/baseline that rows name.
type program struct {
	args  []string // for few samples, and what rows need
	quick bool     // it takes some seconds
	// file is its name in testdata/baseline, if that is another; folder says that it gets one for its files, behind -f.
	file   string
	folder bool
}

var programs = map[string]program{
	"calls":    {args: []string{"1"}, quick: true},
	"launch":   {args: []string{"2"}, quick: true},
	"link":     {quick: true},
	"loader":   {args: []string{"1"}},
	"managed":  {args: []string{"2", "1"}},
	"pin":      {args: []string{"1"}},
	"ring":     {args: []string{"2"}, quick: true},
	"transfer": {args: []string{"2", "fresh", "scattered", "files"}},
}

// fanoutProgram is the name of the program that copies onto so many GPUs, from memory or from a file.
func fanoutProgram(gpus int, fromFile bool) string {
	name := "fanout-" + strconv.Itoa(gpus)
	if fromFile {
		name += "-file"
	}
	return name
}

func init() {
	threads := map[int]string{2: "16", 4: "16,24", 8: "24,48"}
	for _, n := range gpuCounts {
		args := []string{"-s", "2", "-t", threads[n], "-d", strconv.Itoa(n), "-m", "2048"}
		programs[fanoutProgram(n, false)] = program{args: args, file: "fanout"}
		programs[fanoutProgram(n, true)] = program{args: args, file: "fanout", folder: true}
	}
}

// A line is a figure that a program in C printed, as Go's benchmarks do: its name without Benchmark, and values
// by unit.
type line struct {
	name   string
	values map[string]float64
}

// parseLines reads the output of a program.
func parseLines(output []byte) (lines []line) {
	for text := range bytes.Lines(output) {
		fields := strings.Fields(string(text))
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		l := line{strings.TrimPrefix(fields[0], "Benchmark"), map[string]float64{}}
		for i := 2; i+1 < len(fields); i += 2 {
			if v, err := strconv.ParseFloat(fields[i], 64); err == nil {
				l.values[fields[i+1]] = v
			}
		}
		lines = append(lines, l)
	}
	return lines
}

// value returns a figure of a line in a unit of rows.
func (l line) value(unit string) (v float64, ok bool) {
	switch {
	case unit == cpuUnit:
		v, ok = l.values["cpu-s/GB"]
	case isRate(unit):
		v, ok = l.values[unit]
	default:
		v, ok = l.values["ns/op"]
		v *= 1e-9 / scale[unit]
	}
	return v, ok && v > 0
}

// fastest returns the figure of the name that has the best median in unit own: its median in unit. The name is
// that wanted, or begins with it if that ends with a slash.
func fastest(lines []line, wanted, own, unit string) (name string, v float64, ok bool) {
	byName := map[string][]line{}
	var names []string
	for _, l := range lines {
		if l.name != wanted && !(strings.HasSuffix(wanted, "/") && strings.HasPrefix(l.name, wanted)) {
			continue
		}
		if byName[l.name] == nil {
			names = append(names, l.name)
		}
		byName[l.name] = append(byName[l.name], l)
	}
	medianOf := func(name, unit string) (float64, bool) {
		var all []float64
		for _, l := range byName[name] {
			if v, ok := l.value(unit); ok {
				all = append(all, v)
			}
		}
		return median(all), len(all) > 0
	}
	best := 0.0
	for _, n := range names {
		if v, has := medianOf(n, own); has && (!ok || v > best == isRate(own)) {
			name, best, ok = n, v, true
		}
	}
	if !ok {
		return "", 0, false
	}
	v, ok = medianOf(name, unit)
	return name, v, ok
}

// A baseline runs the programs of a folder, each once.
type baseline struct {
	dir     string // of the programs
	files   string // a folder for those that get one
	quick   bool
	limit   time.Duration // of a program, programTimeout if it is 0
	outputs map[string][]line
	errs    map[string]error
}

func (b *baseline) lines(ctx context.Context, name string) ([]line, error) {
	if b.outputs[name] == nil && b.errs[name] == nil {
		b.outputs[name], b.errs[name] = b.run(ctx, name)
	}
	return b.outputs[name], b.errs[name]
}

func (b *baseline) timeout() time.Duration { return cmp.Or(b.limit, programTimeout) }

func (b *baseline) run(ctx context.Context, name string) ([]line, error) {
	path := filepath.Join(b.dir, cmp.Or(programs[name].file, name))
	if _, err := os.Stat(path); b.dir == "" || errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s was not built", name)
	}
	if b.quick && !programs[name].quick {
		return nil, fmt.Errorf("%s takes too long for -quick", name)
	}
	args := programs[name].args
	if programs[name].folder {
		args = append(args[:len(args):len(args)], "-f", b.files)
	}
	if name == "ring" && !hugePagesAlways() {
		args = append(args[:len(args):len(args)], "plain") // memory as that of Go
	}
	ctx, cancel := context.WithTimeout(ctx, b.timeout())
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	var said bytes.Buffer
	cmd.Stderr = &said
	output, err := cmd.Output()
	lines := parseLines(output)
	switch {
	case err == nil && len(lines) == 0:
		err = errors.New("it printed no figure")
	case ctx.Err() != nil && len(lines) > 0:
		err = nil // each line is a result, also of a program that took too long for all
	case ctx.Err() != nil:
		err = fmt.Errorf("not done after %v", b.timeout())
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(said.String()))
	}
	return lines, nil
}

// hugePagesAlways reports whether a Go slice is in huge pages.
func hugePagesAlways() bool {
	text, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/enabled")
	return err == nil && strings.Contains(string(text), "[always]")
}
