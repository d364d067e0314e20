// Package bench holds the experiments of pincheck: what each measures, on what, and what
// it answers. [measure.Run] runs them.
package bench
