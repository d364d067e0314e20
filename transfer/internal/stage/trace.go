package stage

import (
	"fmt"
	"time"
)

var (
	traceOn bool
	traceAt time.Time
	traces  [4096]traced
	traceN  int
)

type traced struct {
	at   time.Duration
	what string
	a, b int
}

func mark(what string, a, b int) {
	if traceOn && traceN < len(traces) {
		traces[traceN] = traced{time.Since(traceAt), what, a, b}
		traceN++
	}
}

func printTrace(name string) {
	fmt.Printf("   trace %s:", name)
	for _, t := range traces[:traceN] {
		fmt.Printf(" %.1f %s %dK,%d;", float64(t.at.Nanoseconds())/1e3, t.what, t.a>>10, t.b>>10)
		if t.what == "worked" {
			fmt.Printf("(h=%d)", t.b)
		}
	}
	fmt.Println()
}
