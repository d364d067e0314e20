package main

import (
	"strconv"
	"time"
)

// planted is by how many percent every measured section is made longer: a build with
// -ldflags "-X main.planted=15" must be found slower.
var planted = "0"

var plantedPercent = func() time.Duration {
	n, err := strconv.Atoi(planted)
	if err != nil {
		panic("main.planted is not a number: " + planted)
	}
	return time.Duration(n)
}()

// since ends a measured section and returns its time.
func since(began time.Time) time.Duration { return stretched(began, plantedPercent) }

func stretched(began time.Time, percent time.Duration) time.Duration {
	took := time.Since(began)
	for end := took + took*percent/100; took < end; {
		took = time.Since(began)
	}
	return took
}

// timed returns the time of f.
func timed(f func() error) (time.Duration, error) {
	began := time.Now()
	err := f()
	return since(began), err
}

// maxOps limits the operations of a sample.
const maxOps = 1 << 20

// measure loops over a task's op until the target's time has been measured, and returns the
// row's figure, and the CPU's if it is wanted.
func measure(r row, t *task, target time.Duration) (sample, error) {
	if t.sample != nil {
		return t.sample(target)
	}
	used := cpuTime()
	var took time.Duration
	ops, step := 0, 1
	for took < target && ops < maxOps {
		if t.before != nil {
			if err := t.before(); err != nil {
				return sample{}, err
			}
		}
		// Several operations are timed together where nothing has to be done between them.
		once, err := timed(func() error {
			for range step {
				if err := t.op(); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return sample{}, err
		}
		if t.after != nil {
			if err := t.after(); err != nil {
				return sample{}, err
			}
		}
		took, ops = took+once, ops+step
		if t.before == nil && t.after == nil && once < target/8 {
			step *= 2
		}
	}
	s := figures(r.unit, took, ops*max(t.count, 1), ops*t.bytes)
	if r.cpu && t.before == nil && t.after == nil {
		s.Figures = append(s.Figures, cpuFigure(used, ops*t.bytes))
	}
	s.Details = map[string]any{"operations": ops * max(t.count, 1)}
	return s, nil
}

// cpuFigure is the process's CPU time since used. Workers that spin for a next copy for a while, and count
// as running until the kernel's next tick, have a millisecond to stop.
func cpuFigure(used time.Duration, bytes int) figure {
	time.Sleep(time.Millisecond)
	return figure{Name: "cpu", Value: (cpuTime() - used).Seconds() / (float64(bytes) / 1e9), Unit: cpuUnit}
}

// figures is a sample of one figure: count operations or bytes that took a time.
func figures(unit string, took time.Duration, count, bytes int) sample {
	seconds := took.Seconds()
	var v float64
	switch unit {
	case "GB/s":
		v = float64(bytes) / 1e9 / seconds
	case "million/s":
		v = float64(count) / 1e6 / seconds
	case "samples/s":
		v = float64(count) / seconds
	default:
		v = seconds / float64(count) / scale[unit]
	}
	return sample{Figures: []figure{{Value: v, Unit: unit}}}
}

// scale has the seconds of each unit of time.
var scale = map[string]float64{"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1}
