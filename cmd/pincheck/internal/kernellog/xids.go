package kernellog

import (
	_ "embed"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// A Class is what a Xid is about.
type Class string

// The classes.
const (
	// Program is work of a program that the GPU refused, and its consequences. The hardware is not accused.
	Program Class = "program"
	// Engine is a part of the GPU that stopped: by a program, the driver or the hardware.
	Engine Class = "engine"
	// Firmware is a processor of the GPU that stopped answering.
	Firmware Class = "firmware"
	// Memory is an error of GPU memory.
	Memory Class = "memory"
	// Bus is a GPU that answers nothing.
	Bus Class = "bus"
	// NVLink is a link between GPUs.
	NVLink Class = "nvlink"
	// Init is a GPU that could not be started.
	Init Class = "init"
	// Information is a message about another Xid, or one that needs nothing.
	Information Class = "information"
)

// A Xid is a row of NVIDIA's catalogue.
type Xid struct {
	Number  int
	Class   Class
	Meaning string
	// Action is what the catalogue says to do at once.
	Action string
}

//go:embed xids.txt
var xidsText string

// xids returns the rows of xids.txt.
var xids = sync.OnceValue(func() (all []Xid) {
	for line := range strings.Lines(xidsText) {
		row := strings.Split(strings.TrimSpace(line), " | ")
		if len(row) != 4 {
			continue // a comment
		}
		for number := range strings.FieldsSeq(row[0]) {
			n, _ := strconv.Atoi(number) // a test reads the file
			all = append(all, Xid{n, Class(row[1]), row[2], row[3]})
		}
	}
	return all
})

// Lookup returns the row of a Xid. A Xid that the catalogue does not explain counts as an error of an engine.
func Lookup(number int) Xid {
	if i := slices.IndexFunc(xids(), func(x Xid) bool { return x.Number == number }); i >= 0 {
		return xids()[i]
	}
	return Xid{Number: number, Class: Engine, Meaning: "not in NVIDIA's catalogue", Action: "contact support"}
}
