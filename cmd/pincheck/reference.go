package main

import (
	"strconv"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/reference"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// expectedRates returns what the devices of an Env can be expected to reach.
func expectedRates(env measure.Env) func(*result.Series) *result.Expected {
	var gpus []reference.GPU
	for _, d := range env.Devices {
		gpus = append(gpus, reference.GPU{Label: strconv.Itoa(d.Ordinal()), Name: d.Name(), PCIBusID: d.PCIBusID()})
	}
	return reference.New(env.Host, gpus)
}
