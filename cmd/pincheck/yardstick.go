package main

import (
	"strconv"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cmd/pincheck/internal/yardstick"
)

// yardsticks returns what the devices of an Env can be expected to reach.
func yardsticks(env measure.Env) func(*result.Series) *result.Expected {
	var gpus []yardstick.GPU
	for _, d := range env.Devices {
		gpus = append(gpus, yardstick.GPU{Label: strconv.Itoa(d.Ordinal()), Name: d.Name(), PCIBusID: d.PCIBusID()})
	}
	return yardstick.New(env.Host, gpus)
}
