package transfer

import "fmt"

// Options shape a Copier. The zero value is what most programs want.
type Options struct {
	// Workers is how many goroutines a copy keeps busy at the most, the caller's
	// included, up to 1024. 0 stands for as many as fill the link, which copies at once
	// on a device share: see "Cores" in the package's documentation. All copies of the
	// process together have no more than seven eighths of GOMAXPROCS, or all where that
	// is up to four.
	Workers int
}

const (
	kib = 1 << 10
	mib = 1 << 20

	maxWorkers = 1024
)

// Validate returns an error that names the option that is invalid, or nil.
func (o Options) Validate() error {
	if o.Workers < 0 || o.Workers > maxWorkers {
		return fmt.Errorf("Options.Workers: %d: must be from 0 to %d", o.Workers, maxWorkers)
	}
	return nil
}
